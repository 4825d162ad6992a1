"""The console in a real browser, in front of a running system of simulated workers."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from shared.bus.nats_bus import connect_nats
from shared.contracts.channels import REPORT_USAGE
from shared.contracts.ids import RouterId
from shared.contracts.usage import ReportUsage, UsageCounts, UsageRow
from tests.nightly.browser.conftest import ADMIN_KEY
from tests.support.nats_server import NatsServer, free_port
from tests.support.processes import service_process
from tests.support.second_model import second_model
from tests.support.simulated_system import SimulatedSystem, simulated_system, until_ready
from tests.support.system import until

LEFT_S_MAX = 60.0
PHONE = {"width": 360, "height": 780}
SECONDS = re.compile(r"(?P<number>[\d.]+) (?P<unit>ms|s)$")
ROUNDED = 0.06
"""Allowed relative error of a sum of numbers that are rounded to two or three digits."""

pytestmark = pytest.mark.nats


@pytest.fixture(scope="module")
def nats(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Depends on the browser, so that nothing starts when the tests are skipped."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, nats: NatsServer) -> Iterator[SimulatedSystem]:
    """Workers with a prefill time long enough for slow requests."""
    folder = tmp_path_factory.mktemp("console")
    keys = folder / "admin_keys"
    keys.write_text(hashlib.sha256(ADMIN_KEY.encode()).hexdigest() + "\n")
    settings = {"WORKER_SIMULATED": "prefill_base_s=0.03", "COLLECTOR_ADMIN_KEY_FILE": str(keys)}
    with simulated_system(folder, nats, **settings) as system:
        yield system


@pytest.fixture
def console(page: Page, system: SimulatedSystem) -> Page:
    """The page, after its first update."""
    page.goto(f"{system.collector_url}/")
    expect(page.locator("#connection")).to_have_text("Live")
    return page


def row_of(console: Page, request_id: str) -> Locator:
    return console.locator(f"[data-request='{request_id}']")


def ask(system: SimulatedSystem, request_id: str, **body: object) -> None:
    """Send one disaggregated request."""
    headers = {"x-request-id": request_id, "x-baton-mode": "disaggregated"}
    answer = system.complete(f"{request_id} wants to know. " * 20, headers, **body)
    assert answer.status_code == 200, answer.text


def mode_of(system: SimulatedSystem) -> str:
    """The mode of a request that does not ask for one."""
    return system.complete("As you like it. " * 20).headers["x-baton-mode"]


def seconds(text: str) -> float:
    """``12.3 ms`` as a number."""
    match = SECONDS.search(text)
    assert match is not None, text
    return float(match["number"]) * (0.001 if match["unit"] == "ms" else 1.0)


def test_the_page_shows_health_and_workers(console: Page):
    expect(console).to_have_url(re.compile("/console$"))
    expect(console.locator("#health")).to_have_attribute("data-status", re.compile("healthy|degraded|unhealthy"))
    expect(console.locator("#served")).to_contain_text("baton-tiny")
    expect(console.locator("[data-id=router]")).to_be_visible()
    expect(console.locator(".column[data-role=prefill] [data-id=p1]")).to_contain_text("ready")
    expect(console.locator(".column[data-role=decode] [data-id=d1]")).to_contain_text("ready")
    expect(console.locator("#figures")).to_contain_text("2 of 2")


def test_a_request_and_its_flows_appear_without_a_reload(console: Page, system: SimulatedSystem):
    assert row_of(console, "by-itself").count() == 0

    ask(system, "by-itself")

    expect(row_of(console, "by-itself")).to_have_attribute("aria-label", re.compile("first token after"))
    assert row_of(console, "by-itself").locator(".bar-ttft rect").count() > 1
    expect(console.locator("#lines [data-from=p1][data-to=d1]")).to_have_attribute("data-text", re.compile("KV"))


def test_this_months_usage_appears_with_budgets(console: Page, system: SimulatedSystem, nats: NatsServer):
    """Markup in a name stays text, here too: a model's comes from its worker."""
    ask(system, "counted")
    expect(console.locator("#usage-table tbody tr", has_text="baton-tiny")).to_contain_text("(no key)")
    day = datetime.now(UTC).date().isoformat()
    counts = UsageCounts(
        requests=1234, failed=5, prompt_tokens=950_000, cached_tokens=475_000, completion_tokens=50_000
    )
    row = UsageRow(day=day, tenant="acme", key="ci", model="<b>m</b>", counts=counts, monthly_tokens=1_000_000)

    async def report() -> None:
        bus = await connect_nats(nats.url, name="router")
        await bus.ask(REPORT_USAGE, ReportUsage(router_id=RouterId("r"), number=1, rows=[row]), timeout_s=LEFT_S_MAX)
        await bus.close()

    with ThreadPoolExecutor(1) as other_loop:
        other_loop.submit(asyncio.run, report()).result()

    shown = console.locator("#usage-table tbody tr", has_text="acme/ci")
    expect(shown.locator("> *")).to_have_text(
        ["acme/ci", "<b>m</b>", "1,234", "5", "950K", "50 %", "50.0K", "0 ms", "100 % of 1.00M"]
    )
    expect(shown.locator("td").last).to_have_attribute("data-level", "error")


def test_a_slow_request_opens_its_decision(console: Page, system: SimulatedSystem):
    ask(system, "too-slow", baton={"ttft_s": 0.001})
    ask(system, "soon-enough", baton={"ttft_s": 3600})
    expect(row_of(console, "soon-enough")).to_be_visible()
    console.get_by_role("button", name="Slow", exact=True).click()
    expect(row_of(console, "soon-enough")).to_have_count(0)

    row_of(console, "too-slow").click()

    panel = console.get_by_role("dialog", name="Request")
    expect(panel.locator(".lead")).to_contain_text("Slow")
    rows = panel.locator(".waterfall tbody tr")
    parts = [seconds(row.locator("td").nth(1).inner_text()) for row in rows.all()[:-2]]
    whole = seconds(panel.locator(".waterfall .sum td").nth(1).inner_text())
    assert len(parts) > 3
    assert sum(parts) == pytest.approx(whole, rel=ROUNDED)
    expect(panel.locator(".decision")).to_contain_text("prefill on p1, decode on d1")
    expect(panel.locator(".decision")).to_contain_text("was chosen because")
    expect(panel.locator(".candidates .chosen")).to_have_count(2)
    expect(panel.locator(".comparison .sum")).to_contain_text("total")
    assert seconds(panel.locator(".comparison .sum td").nth(1).inner_text()) == pytest.approx(whole, rel=ROUNDED)


def test_the_address_of_a_decision_opens_it(console: Page, system: SimulatedSystem):
    answer = system.complete("Where is it kept? " * 20, {"x-request-id": "kept"})
    decision_id = answer.headers["x-baton-decision"]

    console.goto(f"{system.collector_url}/console#request={decision_id}")

    expect(console.locator("#panel .decision")).to_contain_text(f"baton explain {decision_id}")


def test_input_of_clients_stays_text(console: Page, system: SimulatedSystem):
    """Markup in a client's input is shown as text."""
    nasty = "<img src=x onerror=document.body.remove()>"

    refused = system.complete("Who are you?", {"x-request-id": "nasty"}, model=nasty)

    assert refused.status_code == 404
    expect(row_of(console, "nasty")).to_contain_text("img src=x")
    row_of(console, "nasty").click()
    expect(console.locator("#panel .decision")).to_contain_text(nasty)
    assert console.locator("main img, #panel img").count() == 0


def test_the_page_works_with_the_keyboard_alone(console: Page, system: SimulatedSystem):
    ask(system, "first")
    ask(system, "second")
    expect(row_of(console, "second")).to_be_visible()
    focused = console.locator(":focus")

    console.keyboard.press("Tab")
    expect(focused).to_have_text("Skip to the requests")
    console.keyboard.press("Enter")
    for _ in range(7):  # three filters of one kind, two of others, the pause; then the list, which is one stop
        console.keyboard.press("Tab")
    expect(focused).to_have_attribute("data-request", "second")
    console.keyboard.press("ArrowDown")
    expect(focused).to_have_attribute("data-request", "first")
    console.keyboard.press("Enter")
    expect(console.locator("#panel")).to_contain_text("first")
    expect(focused).to_have_text("Request")
    console.keyboard.press("Escape")
    expect(console.locator("#panel")).to_be_hidden()
    expect(focused).to_have_attribute("data-request", "first")


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_the_page_fits_a_phone_without_horizontal_scrolling(console: Page, system: SimulatedSystem, colours: str):
    ask(system, f"on-a-phone-{colours}")
    console.emulate_media(color_scheme=colours)
    console.set_viewport_size(PHONE)
    row_of(console, f"on-a-phone-{colours}").click()
    expect(console.locator("#panel .candidates").first).to_be_visible()

    assert width_of(console) == PHONE["width"]
    assert (brightness_of(console, "#panel") > 0.5) == (colours == "light")
    console.keyboard.press("Escape")
    console.get_by_role("button", name="Table", exact=True).click()
    expect(console.locator("#worker-table")).to_contain_text("p1")
    assert width_of(console) == PHONE["width"]


@pytest.mark.parametrize("width", [PHONE["width"], 1400])
def test_names_as_long_as_a_client_can_send_do_not_widen_the_page(console: Page, system: SimulatedSystem, width: int):
    console.set_viewport_size({**PHONE, "width": width})
    for letter in "iW":
        answer = system.complete("A long name. " * 20, {"x-request-id": letter * 128, "x-baton-tenant": letter * 64})
        assert answer.status_code == 200, answer.text
    expect(console.locator("#tenant-table")).to_contain_text("W" * 64)

    assert width_of(console) == width


def test_a_chosen_theme_survives_a_reload(console: Page):
    console.get_by_role("button", name="Switch to dark colours").click()
    assert brightness_of(console, "body") < 0.5

    console.reload()

    assert brightness_of(console, "body") < 0.5


def test_a_lost_connection_is_shown_and_restored(page: Page, forgiven: list[str], nats: NatsServer, tmp_path: Path):
    forgiven.append("net::ERR_")
    port = free_port()
    settings = {"BATON_NATS_URL": nats.url, "COLLECTOR_PORT": str(port)}
    with service_process("collector", tmp_path, **settings):
        until_ready(f"http://127.0.0.1:{port}/ready")
        page.goto(f"http://127.0.0.1:{port}/console")
        expect(page.locator("#connection")).to_have_text("Live")

    expect(page.locator("#connection")).to_contain_text("Connection lost")
    with service_process("collector", tmp_path, **settings):
        expect(page.locator("#connection")).to_have_text("Live")
        expect(page.locator("[data-id=p1]")).to_contain_text("ready")


def test_the_default_mode_can_be_set(console: Page, system: SimulatedSystem):
    console.get_by_role("button", name="Default mode: auto …").click()
    dialog = console.get_by_role("dialog", name="Default mode")
    dialog.get_by_label("Mode").select_option("aggregated")
    dialog.get_by_label("Admin key").fill(ADMIN_KEY)
    dialog.get_by_role("button", name="Set default mode").click()
    expect(dialog.get_by_role("status")).to_have_attribute("data-state", "done")

    console.keyboard.press("Escape")

    expect(console.get_by_role("button", name="Default mode: aggregated …")).to_be_focused()
    until(lambda: mode_of(system) == "aggregated", "the router follows")


def test_orders_need_the_admin_key(console: Page, forgiven: list[str], system: SimulatedSystem):
    """The last test, because it removes a worker."""
    forgiven.append("status of 40[13]")
    console.locator("[data-id=p1]").click()
    console.get_by_role("button", name="Drain …").click()
    dialog = console.get_by_role("dialog", name="Drain p1?")
    dialog.get_by_label("Admin key").fill("a guess")
    dialog.get_by_role("button", name="Drain p1").click()
    expect(dialog.get_by_role("status")).to_have_attribute("data-state", "refused")
    assert system.processes["p1"].process.poll() is None

    dialog.get_by_label("Admin key").fill(ADMIN_KEY)
    dialog.get_by_role("button", name="Drain p1").click()

    expect(dialog.get_by_role("status")).to_have_attribute("data-state", "done")
    dialog.get_by_role("button", name="Close").click()
    expect(console.locator("#event-rows")).to_contain_text("ordered it to drain")
    assert system.processes["p1"].process.wait(LEFT_S_MAX) == 0
    expect(console.locator("#figures")).not_to_contain_text("2 of 2")


def width_of(console: Page) -> int:
    """Width of the scrollable page."""
    return int(console.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"))


def brightness_of(console: Page, selector: str) -> float:
    """Brightness of the background, from 0 to 1."""
    colour = console.locator(selector).evaluate("node => getComputedStyle(node).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / (3 * 255)


def test_several_models_have_a_table(page: Page, tmp_path: Path):
    with NatsServer(tmp_path) as nats, simulated_system(tmp_path, nats) as system:
        page.goto(f"{system.collector_url}/")
        expect(page.locator("#connection")).to_have_text("Live")
        expect(page.locator("#models")).to_be_hidden()
        second = {"WORKER_ENGINE": "simulated", "WORKER_MODEL": second_model(tmp_path), "WORKER_ASLEEP": "true"}

        with service_process("worker", tmp_path, BATON_NATS_URL=nats.url, WORKER_WORKER_ID="b1", **second):
            expect(page.locator("#models")).to_be_visible()
            rows = page.locator("#model-table tbody tr")
            expect(rows.filter(has_text="baton-tiny")).to_contain_text("1 decode, 1 prefill")
            expect(rows.filter(has_text="second")).to_contain_text("none")
            table = page.locator("#model-table")
            assert table.evaluate("node => node.scrollWidth <= node.clientWidth"), "its columns are cut off"
            assert system.complete("Who are you?").status_code == 200
            outcome = page.locator(".row .who span").first
            expect(outcome).to_have_text(re.compile("decode first|P/D|aggregated"))
            assert outcome.evaluate("node => node.scrollWidth <= node.clientWidth"), "a model's name hides it"
            expect(page.locator("[data-id=b1]")).to_contain_text("asleep")
            expect(page.locator("#health-sentences")).to_contain_text("is asleep; a request wakes it")
        page.goto("about:blank")  # Before its stream ends.
