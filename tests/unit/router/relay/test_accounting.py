"""Requests are accounted for many at a time, and nobody who asks sees that."""

from __future__ import annotations

from services.router.decisions.decision_filter import DecisionFilter
from services.router.relay.accounting import ENDED_AT_ONCE_MAX
from services.router.request.context import RequestContext
from services.router.request.facts import RequestFacts
from services.router.request.head import Head
from services.router.request.http_request import HttpRequest, NoConnection, Upload, UploadTotals
from shared.bus.leg_inbox import LegInbox
from shared.contracts.ids import RouterId
from shared.telemetry import names
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.unit.router.world import World, in_world, prompt

COUNTED = {"mode": "aggregated", "status": "200"}


def counted(world: World) -> float:
    """As a scrape sees it."""
    return world.router.registry.get_sample_value(f"{names.ROUTER_REQUESTS.name}", COUNTED) or 0.0


@in_world()
async def test_a_scrape_and_a_decision_include_the_request_that_has_just_ended(world: World):
    await world.worker("w1")
    response = await world.ask(prompt())
    reports = world.router.request_log.reports

    assert len(reports) == 0  # Nobody has asked.
    decision = world.router.decisions.log.find(response.headers["x-baton-decision"])
    assert decision is not None
    assert decision.outcome == "ok"
    assert len(reports) == 1

    await world.ask(prompt())
    assert counted(world) == 2
    assert [one.outcome for one in world.router.decisions.log.listed(DecisionFilter())] == ["ok", "ok"]


@in_world()
async def test_many_requests_are_accounted_for_without_being_asked_for(world: World):
    await world.worker("w1")
    for _ in range(ENDED_AT_ONCE_MAX - 1):
        await world.ask(prompt())
    reports = world.router.request_log.reports
    waiting = len(reports)
    await world.ask(prompt())

    assert (waiting, len(reports)) == (0, ENDED_AT_ONCE_MAX)


def unaccountable() -> RequestContext:
    """Its model is no name."""
    head, upload = Head("/v1/completions", [], lambda: "r1"), Upload(0.0, UploadTotals())
    context = RequestContext(
        http_request=HttpRequest(NoConnection(), head, upload, http11=True, keep_alive=True),
        inbox=LegInbox(MemoryBus(MemoryHub()), RouterId("r1"), leg_buffer_bytes_max=1 << 20),
        started_at=0.0,
        ends_at=1000.0,
        on_end=lambda: None,
    )
    context.facts = RequestFacts(path="/v1/completions", model=["m"])  # type: ignore[arg-type]
    return context


@in_world()
async def test_a_request_that_cannot_be_accounted_for_costs_no_other(world: World, caplog):
    await world.worker("w1")
    await world.ask(prompt())
    world.router.accounting.add(unaccountable(), 0.0, (0, 0))
    await world.ask(prompt())

    assert counted(world) == 2
    assert "could not be accounted for" in caplog.text
