"""The console over HTTP: page, one request's decision, and orders with their permission checks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib

import httpx
import msgspec
import pytest

from services.collector.access import Access, check, read_permissions
from services.collector.app import page_files
from services.collector.settings import Settings
from shared.bus.port import AskRefused
from shared.contracts.channels import ADAPTER_ORDERED, CHANGE_ROLE, DECISION, DEFAULT_MODE, DRAIN, ORDER_ADAPTER
from shared.contracts.control import FLEET
from shared.contracts.decisions import CandidateRecord, DecisionRecord, FoundDecision, Part
from shared.contracts.failures import Failure, Reason
from shared.contracts.fleet_orders import AdapterChanged, AdapterOrdered, OrderTaken, RoleChanged
from shared.contracts.workers import Role
from shared.http.limits import BODY_BYTES_MAX
from shared.runtime.settings import SettingsError
from tests.unit.collector.console_world import PARTS, finished, serving, world

WAIT_S_MAX = 60.0
KEY = "baton-test-key"
DRAIN_D1 = {"action": "drain", "worker_id": "d1"}


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "admin.keys"
    file.write_text(
        f"# admins\n{hashlib.sha256(b'another').hexdigest()}\n{hashlib.sha256(KEY.encode()).hexdigest()}  # me\n"
    )
    return str(file)


def bearer(key=KEY):
    return {"authorization": f"Bearer {key}"}


async def answer_drain(one, refusal=""):
    orders = []

    async def take(order, _envelope):
        orders.append(order)
        return OrderTaken(worker_id=order.worker_id, epoch=1, refusal=refusal)

    await one.others.answer(DRAIN, take, worker_id="d1")
    return orders


def message(answer):
    return answer.json()["error"]["message"]


async def test_the_root_redirects_to_the_page_and_its_files_are_served():
    async with world() as one, one.client() as client:
        root = await client.get("/")
        assert (root.status_code, root.headers["location"]) == (307, "/console")
        page = await client.get("/console")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.content == page_files()["index.html"]
        for name in page_files():
            assert (await client.get(f"/console/files/{name}")).status_code == 200
        for name in ("nothing.js", "..%2Fservice.py", "%2e%2e"):
            assert (await client.get(f"/console/files/{name}")).status_code == 404


async def test_every_response_has_security_headers():
    async with (
        world() as one,
        serving(one) as (_server, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        for path in ("/console", "/console/files/nothing", "/console/requests/x", "/health", "/nowhere"):
            headers = (await client.get(path, headers={"origin": "http://elsewhere.example"})).headers
            assert "default-src 'self'" in headers["content-security-policy"]
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
            assert "access-control-allow-origin" not in headers


async def test_a_decision_is_fetched_from_the_router_that_made_it():
    candidates = [
        CandidateRecord(worker_id="p1", part=Part.PREFILL, chosen=True, cached_tokens=40, prefill_s=0.1, cost_s=0.1),
        CandidateRecord(worker_id="p2", part=Part.PREFILL, queue_s=0.4, prefill_s=0.1, cost_s=0.5),
    ]
    decision = DecisionRecord(
        decision_id="router-1-ab-d00000000000000000000000000000007", router_id="router-1-ab", request_id="r1", at_unix_s=1.0, model="m", mode="disaggregated",
        reason="costs least", candidates=candidates, prefill_worker="p1", decode_worker="d1", predicted=PARTS, measured=PARTS,
        ttft_s=PARTS.total_s(), outcome="ok", itl_target_s=0.1, itl_s=0.09, predicted_itl_s=0.097, itl_probability=0.61,
    )  # fmt: skip

    async def found(ask, _envelope):
        return FoundDecision(decision=decision if ask.decision_id == decision.decision_id else None)

    async with world() as one, one.client() as client:
        await one.others.answer(DECISION, found, router_id="router-1-ab")
        await one.be_healthy()
        await one.finish(finished())
        told = (await client.get("/console/requests/router-1-ab-d00000000000000000000000000000007")).json()
        assert told["request"]["id"] == "r1"
        assert [each["why"] for each in told["decision"]["candidates"]] == ["chosen", "longer queue"]
        assert sum(part["measured_s"] for part in told["decision"]["parts"]) == pytest.approx(PARTS.total_s())
        assert told["text"]["headline"] == "Request r1 ran: prefill on p1, decode on d1."
        target = "ITL target 100 ms: met (90 ms); 97 ms predicted, which meets it with 61 %"
        assert told["text"]["targets"] == [target]

        forgotten = await client.get("/console/requests/router-1-ab-d00000000000000000000000000000008")
        assert (forgotten.status_code, "no longer has" in message(forgotten)) == (404, True)
        ended = await client.get("/console/requests/router-9-d00000000000000000000000000000001")
        assert (ended.status_code, "does not respond" in message(ended)) == (404, True)
        assert (
            await client.get("/console/requests/no.such*thing-d00000000000000000000000000000001")
        ).status_code == 404
        one.bus.lose()
        assert (await client.get("/console/requests/router-1-ab-d00000000000000000000000000000007")).status_code == 503


async def test_on_loopback_an_order_needs_no_key_and_becomes_an_event():
    async with world() as one, one.client() as client:
        orders = await answer_drain(one)
        done = await client.post("/console/orders", json={**DRAIN_D1, "deadline_s": 5})

        assert (done.status_code, done.json()["message"]) == (
            200,
            "d1 is draining, moving its hot prefixes to other workers.",
        )
        assert [(order.worker_id, order.deadline_s) for order in orders] == [("d1", 5.0)]
        assert [(line.subject, line.kind) for line in one.collector.page().events] == [("d1", "action")]


async def test_a_role_changes_after_the_worker_has_verified_it():
    async def change(order, _envelope):
        failure = "no partner" if order.role is Role.PREFILL else ""
        return RoleChanged(
            worker_id="d1", epoch=1, before=Role.DECODE, role=Role.DECODE if failure else order.role, failure=failure
        )

    async with world() as one, one.client() as client:
        await one.others.answer(CHANGE_ROLE, change, worker_id="d1")
        done = await client.post("/console/orders", json={"action": "role", "worker_id": "d1", "role": "both"})
        assert "d1 changed its role from decode to both" in done.json()["message"]
        failed = await client.post("/console/orders", json={"action": "role", "worker_id": "d1", "role": "prefill"})
        assert (failed.status_code, message(failed)) == (409, "d1 remains a decode worker: no partner")


async def test_an_order_about_an_adapter_goes_to_the_orchestrator():
    async def orchestrate(order, _envelope):
        failure = "no such folder" if order.path == "nowhere" else ""
        changes = [AdapterChanged(worker_id="d1", epoch=1, digest="0" * 64, failure=failure)]
        done = AdapterOrdered(order=order, at_ms=0, changes=changes)
        await one.others.publish(ADAPTER_ORDERED, done)
        return done

    load = {"action": "adapter", "change": "load", "name": "sql", "path": "sql-v1"}
    async with world() as one, one.client() as client:
        assert (await client.post("/console/orders", json=load)).status_code == 503
        await one.others.answer(ORDER_ADAPTER, orchestrate)
        done = await client.post("/console/orders", json=load)
        assert (done.status_code, done.json()["message"]) == (200, "sql was loaded on 1 worker.")
        failed = await client.post("/console/orders", json={**load, "path": "nowhere", "workers": ["d1"]})
        assert (failed.status_code, message(failed)) == (409, "sql was loaded on 0 workers; d1: no such folder")
        newest, before = one.collector.page().events[:2]
        assert (newest.subject, newest.level, before.level) == ("sql", "warning", "info")
        assert "by console" in newest.text


async def test_the_default_mode_is_stored_for_all_routers_and_shown():
    async with world() as one, one.client() as client:
        following = asyncio.get_running_loop().create_task(one.collector.follow_mode())
        store = await one.others.key_value_store(DEFAULT_MODE)
        done = await client.post("/console/orders", json={"action": "mode", "mode": "disaggregated"})

        assert done.json()["message"] == "The default mode is disaggregated now."
        assert (await store.get(FLEET)).value.mode == "disaggregated"
        async with asyncio.timeout(WAIT_S_MAX):
            while one.collector.page().default_mode != "disaggregated":
                await asyncio.sleep(0)
        one.bus.lose()
        assert (await client.post("/console/orders", json={"action": "mode", "mode": "auto"})).status_code == 503
        following.cancel()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"action": "dance", "worker_id": "d1"}', 400),
        (b'{"action": "drain"}', 400),
        (b'{"action": "drain", "worker_id": "d1.*"}', 400),
        (b'{"action": "drain", "worker_id": "d1", "deadline_s": -1}', 400),
        (b'{"action": "drain", "worker_id": "d1", "evil": 1}', 400),
        (b'{"action": "role", "worker_id": "d1", "role": "store"}', 400),
        (b'{"action": "mode", "mode": "decode_first"}', 400),
        (b'{"action": "adapter", "change": "steal", "name": "sql"}', 400),
        (b'{"action": "adapter", "change": "load", "name": 7}', 400),
        (b'{"action": "drain", "worker_id": "d9"}', 409),
        (b" " * (BODY_BYTES_MAX + 1), 413),
    ],
)
async def test_an_invalid_order_reaches_no_worker(body, status):
    async with world() as one, one.client() as client:
        orders = await answer_drain(one)
        refused = await client.post("/console/orders", content=body, headers={"content-type": "application/json"})

        assert (refused.status_code, orders) == (status, [])
        assert message(refused)


async def test_a_form_post_of_another_site_is_rejected():
    async with world() as one, one.client() as client:
        orders = await answer_drain(one)
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            body = msgspec.json.encode(DRAIN_D1)
            assert (
                await client.post("/console/orders", content=body, headers={"content-type": kind})
            ).status_code == 415
        assert orders == []


async def test_dns_rebinding_gives_no_permission():
    async with world() as one, one.client("http://elsewhere.example:8001") as client:
        orders = await answer_drain(one)
        refused = await client.post("/console/orders", json=DRAIN_D1)

        assert (refused.status_code, orders) == (403, [])


PAGES = [
    {"host": "rebound.example:8001"},
    {"origin": "https://elsewhere.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"},
]


@pytest.mark.parametrize("headers", PAGES)
async def test_pages_of_other_sites_can_neither_read_nor_act(headers):
    async with (
        world() as one,
        serving(one) as (_server, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, headers=headers) as client,
    ):
        orders = await answer_drain(one)
        for path in ("/console", "/console/events", "/console/requests/x", "/metrics"):
            assert (await client.get(path)).status_code == 403
        refused = await client.post("/console/orders", json=DRAIN_D1)

        assert (refused.status_code, orders) == (403, [])
        assert (await client.get("/health")).status_code == 200


async def test_a_link_of_another_site_leads_to_the_console():
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    async with (
        world() as one,
        serving(one) as (_server, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        assert (await client.get("/console", headers=link)).status_code == 200


@pytest.mark.parametrize("url", ["http://localhost:8001", "http://127.0.0.1:8001", "http://[::1]:8001", "http://[::1]"])
async def test_loopback_names_give_permission(url):
    async with world() as one, one.client(url) as client:
        await answer_drain(one)
        assert (await client.post("/console/orders", json=DRAIN_D1)).status_code == 200


async def test_a_configured_admin_key_is_required_on_every_address(key_file):
    async with world(host="0.0.0.0", key_file=key_file) as one, one.client("http://fleet.example") as client:
        orders = await answer_drain(one)
        for headers in ({}, bearer("wrong"), bearer(""), bearer("x" * 10_000), {"authorization": "Basic eDp5"}):
            refused = await client.post("/console/orders", json=DRAIN_D1, headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert orders == []
        assert (await client.post("/console/orders", json=DRAIN_D1, headers=bearer())).status_code == 200


async def test_without_a_key_orders_need_loopback():
    async with world(host="0.0.0.0") as one, one.client() as client:
        orders = await answer_drain(one)
        refused = await client.post("/console/orders", json=DRAIN_D1, headers=bearer())

        assert (refused.status_code, orders) == (403, [])
        assert "COLLECTOR_ADMIN_KEY_FILE" in message(refused)


async def test_removing_a_key_from_the_file_revokes_it_at_once(key_file, tmp_path):
    async with world(host="0.0.0.0", key_file=key_file) as one, one.client() as client:
        await answer_drain(one)
        assert (await client.post("/console/orders", json=DRAIN_D1, headers=bearer())).status_code == 200
        (tmp_path / "admin.keys").write_text("0" * 64)
        assert (await client.post("/console/orders", json=DRAIN_D1, headers=bearer())).status_code == 401
        (tmp_path / "admin.keys").unlink()
        assert (await client.post("/console/orders", json=DRAIN_D1, headers=bearer())).status_code == 503


async def test_api_keys_with_the_permission_admin_are_admin_keys(tmp_path):
    file = tmp_path / "keys.toml"
    entry = '[[key]]\nsha256 = "{}"\ntenant = "t"\npermissions = {}\n'
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in ("clients", KEY)]
    file.write_text(entry.format(digests[0], '["infer"]') + entry.format(digests[1], '["infer", "admin"]'))
    async with world(host="0.0.0.0", key_file=str(file)) as one, one.client() as client:
        await answer_drain(one)
        assert (await client.post("/console/orders", json=DRAIN_D1, headers=bearer("clients"))).status_code == 401
        assert (await client.post("/console/orders", json=DRAIN_D1, headers=bearer())).status_code == 200
    file.write_text(entry.format(digests[0], '["infer"]'))
    assert read_permissions(str(file)) == {digests[0]: {"infer"}}


@pytest.mark.parametrize(
    "text", ["", "[[key]]", "[[key]]\nsha256 = 1", "# nobody\n", "abc\n", "g" * 64, "\n".join(["0" * 64] * 65)]
)
def test_a_key_file_without_digests_stops_the_start(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)

    with pytest.raises(SettingsError, match="COLLECTOR_ADMIN_KEY_FILE"):
        Access("127.0.0.1", str(file)).permissions()
    with pytest.raises(SettingsError, match="no-such-file"):
        read_permissions(str(tmp_path / "no-such-file"))


async def test_a_refusal_by_worker_or_bus_reaches_the_client():
    async def refuse(_order, _envelope):
        raise AskRefused(Failure(reason=Reason.WORKER_DRAINING, message="it leaves"))

    async with world() as one, one.client() as client:
        await one.others.answer(DRAIN, refuse, worker_id="d2")
        refused = await client.post("/console/orders", json={"action": "drain", "worker_id": "d2"})
        assert (refused.status_code, message(refused)) == (409, "d2 refused the order: it leaves")
        await answer_drain(one, refusal="it drains already")
        refused = await client.post("/console/orders", json=DRAIN_D1)
        assert (refused.status_code, message(refused)) == (409, "d1 refused the order: it drains already")
        one.bus.lose()
        assert (await client.post("/console/orders", json=DRAIN_D1)).status_code == 503


READ = ("/", "/console", "/console/files/console.js", "/console/requests/x", "/console/events", "/metrics", "/nowhere")


def basic(key=KEY):
    return {"authorization": "Basic " + base64.b64encode(f"anyone:{key}".encode()).decode()}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_with_keys_only_view_and_admin_read_what_the_collector_knows(tmp_path, host):
    file = tmp_path / "keys.toml"
    entry = '[[key]]\nsha256 = "{}"\ntenant = "t"\npermissions = {}\n'
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in ("client", "viewer", KEY)]
    file.write_text("".join(map(entry.format, digests, ('["infer"]', '["view"]', '["admin"]'))))
    async with world(host=host, key_file=str(file)) as one, one.client() as client:
        for path in READ:
            if (host, path) == ("127.0.0.1", "/metrics"):
                continue  # As at routers: every user of this machine may scrape.
            for strange in (
                {},
                bearer("x"),
                bearer("client"),
                basic("client"),
                {"authorization": "Basic !"},
                {"x-api-key": ""},
            ):
                refused = await client.get(path, headers=strange)
                assert (refused.status_code, "Basic" in refused.headers["www-authenticate"]) == (401, True)
            for known in (bearer("viewer"), basic("viewer"), basic(), {"x-api-key": "viewer"}):
                if path != "/console/events":  # It would go on for ever.
                    assert (await client.get(path, headers=known)).status_code in {200, 307, 404}
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200
        file.unlink()
        assert (await client.get("/console", headers=bearer("viewer"))).status_code == 503


async def test_a_key_that_a_browser_adds_by_itself_gives_no_orders(key_file):
    """Otherwise a page of another site could have its visitor's browser give them."""
    async with world(key_file=key_file) as one, one.client() as client:
        orders = await answer_drain(one)

        assert (await client.post("/console/orders", json=DRAIN_D1, headers=basic())).status_code == 401
        assert orders == []


@pytest.mark.parametrize(
    ("settings", "starts"),
    [
        ({}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "gpu-1.example"}, False),
        ({"host": "0.0.0.0", "published_host": "127.0.0.1"}, True),
        ({"host": "127.0.0.1", "published_host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "insecure": True}, True),
        ({"host": "0.0.0.0", "admin_key_file": "KEYS"}, True),
    ],
)  # fmt: skip
def test_a_collector_that_others_can_reach_needs_keys(settings, starts, key_file):
    chosen = Settings(**{name: key_file if value == "KEYS" else value for name, value in settings.items()})
    with contextlib.nullcontext() if starts else pytest.raises(SettingsError, match="baton keys new"):
        check(chosen)
