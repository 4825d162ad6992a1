"""What a router counts for the usage ledger, and how it reports it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest

from services.router.usage import REPORT_S, ROWS_MAX, Place, Spender, UnstoredUsage
from shared.bus.port import AskRefused
from shared.contracts.api_keys import digest_of
from shared.contracts.channels import REPORT_USAGE
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegReport
from shared.contracts.usage import ROWS_PER_REPORT_MAX, ReportUsage, UsageCounts, UsageRow, UsageStored
from tests.support.memory_bus import MemoryBus
from tests.unit.router.world import World, in_world, run_in_world

KEYS = f'salt = "{"s" * 32}"\n[[key]]\ntenant = "acme"\nname = "ci"\nsha256 = "{digest_of(b"k")}"\n'
NAMELESS = KEYS.replace('name = "ci"\n', "")
PROMPT = {"model": "m", "prompt": [1, 2, 3, 4], "max_tokens": 3}


def add(usage: UnstoredUsage, key="k", prompt_tokens=10) -> None:
    counts = UsageCounts(requests=1, prompt_tokens=prompt_tokens, prefill_s=0.5)
    usage.add(Place("2026-11-23", "acme", key, "m"), counts, 100)


@dataclass
class Collector:
    """Stores reports, or refuses them while ``refuses``."""

    refuses: bool = False
    reports: list[ReportUsage] = field(default_factory=list)

    async def open(self, world: World) -> None:
        await MemoryBus(world.hub).answer(REPORT_USAGE, self._take)

    async def _take(self, report: ReportUsage, _envelope) -> UsageStored:
        self.reports.append(report)
        if self.refuses:
            raise AskRefused(Failure(reason=Reason.BUS_DOWN, message="no ledger"))
        return UsageStored(router_id=report.router_id, number=report.number)

    def rows(self) -> list[UsageRow]:
        return [one for report in self.reports for one in report.rows]


@pytest.mark.parametrize("ranks", [1, 4])
@in_world(keys=KEYS)
async def test_a_served_request_is_counted_for_its_key_and_model(world: World, ranks):
    def counted(_worker, _start, frames) -> None:
        frames.head(200, "application/json")
        frames.data(b"{}")
        frames.end(LegReport(prompt_tokens=1000, completion_tokens=100, cached_tokens=200))

    collector = Collector()
    await collector.open(world)
    await world.worker("w1", script=counted, ranks=ranks)

    assert (await world.ask(PROMPT, x_api_key="k")).status == 200
    await asyncio.sleep(REPORT_S + 0.5)

    (one,) = collector.rows()
    counts = one.counts
    assert (one.tenant, one.key, one.model) == ("acme", "ci", "m")
    assert (counts.requests, counts.failed, counts.cancelled) == (1, 0, 0)
    assert (counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens) == (1000, 200, 100)
    # The speeds that are assumed of an engine before it is measured: 800 tokens at 4,000/s, 99 steps of 15 ms.
    assert counts.prefill_s == pytest.approx(ranks * 0.2, rel=0.2)
    assert counts.decode_s == pytest.approx(ranks * 1.5, rel=0.2)


@in_world(keys=NAMELESS)
async def test_without_a_name_the_key_is_shown_by_the_beginning_of_its_digest(world: World):
    collector = Collector()
    await collector.open(world)
    await world.worker("w1")
    await world.ask(PROMPT, x_api_key="k")
    await world.router.usage.report_now()

    assert collector.rows()[0].key == digest_of(b"k")[:12]


@in_world()
async def test_without_keys_neither_tenant_nor_unknown_model_of_a_client_makes_a_row(world: World):
    collector = Collector()
    await collector.open(world)
    await world.worker("w1")
    await world.ask(PROMPT, x_baton_tenant="made-up")
    await world.ask({**PROMPT, "model": "made-up"}, x_baton_tenant="another")
    await world.router.usage.report_now()

    found = [(one.tenant, one.key, one.model, one.counts.requests, one.counts.failed) for one in collector.rows()]
    assert sorted(found) == [("", "", "", 1, 1), ("", "", "m", 1, 0)]


@in_world()
async def test_a_client_that_leaves_is_cancelled_and_counts_what_was_computed(world: World):
    def held(_worker, _start, frames) -> None:
        frames.head(200, "text/event-stream")

    collector = Collector()
    await collector.open(world)
    await world.worker("w1", script=held)
    connection, answering = world.begin(msgspec.json.encode({**PROMPT, "stream": True}))
    await asyncio.sleep(1)
    connection.leave()
    await answering
    await world.router.usage.report_now()

    (one,) = collector.rows()
    assert (one.counts.cancelled, one.counts.failed) == (1, 0)
    assert one.counts.prompt_tokens > 0  # As the router estimates it: the engine has reported nothing.


@in_world()
async def test_a_request_that_the_engine_refuses_has_failed_and_used_nothing(world: World):
    def refused(_worker, _start, frames) -> None:
        frames.head(400, "application/json")
        frames.data(b"{}")
        frames.end(LegReport(prompt_tokens=-1, completion_tokens=-1))

    collector = Collector()
    await collector.open(world)
    await world.worker("w1", script=refused)
    assert (await world.ask(PROMPT)).status == 400
    await world.router.usage.report_now()

    assert collector.rows()[0].counts == UsageCounts(requests=1, failed=1)


@in_world()
async def test_a_report_is_repeated_unchanged_until_it_is_stored(world: World):
    collector = Collector(refuses=True)
    await collector.open(world)
    await world.worker("w1")
    await world.ask(PROMPT)
    await world.router.usage.report_now()
    await world.ask(PROMPT)
    await world.router.usage.report_now()
    collector.refuses = False
    await world.router.usage.report_now()

    first, again, stored, rest = collector.reports
    assert first == again == stored
    assert (rest.number, rest.rows[0].counts.requests) == (first.number + 1, 1)


def test_a_router_that_stops_reports_its_last_requests():
    collector = Collector()

    async def scenario(world: World) -> None:
        await collector.open(world)
        await world.worker("w1")
        await world.ask(PROMPT)

    run_in_world(scenario)
    assert [one.counts.requests for one in collector.rows()] == [1]


def test_unstored_usage_is_bounded_and_counts_what_it_drops():
    usage = UnstoredUsage()
    for number in range(ROWS_MAX + 5):
        add(usage, f"k{number}")
    add(usage, "k0")

    assert usage.uncounted == 5
    assert usage.next_report()
    assert len(usage.report) == ROWS_PER_REPORT_MAX
    assert usage.report[0] == UsageRow(
        day="2026-11-23", tenant="acme", key="k0", model="m", monthly_tokens=100,
        counts=UsageCounts(requests=2, prompt_tokens=20, prefill_s=1.0),
    )  # fmt: skip


def test_what_is_not_stored_counts_until_its_own_report_is_stored():
    usage, spender = UnstoredUsage(), Spender("2026-11", "acme", "k")
    add(usage)
    usage.next_report()
    add(usage, prompt_tokens=5)

    assert usage.tokens_of(spender) == 15
    usage.stored(usage.number)
    assert usage.tokens_of(spender) == 5
    usage.next_report()
    usage.stored(usage.number - 1)  # a late reply to the first
    assert usage.tokens_of(spender) == 5
    assert usage.tokens_of(Spender("2026-12", "acme", "k")) == 0
