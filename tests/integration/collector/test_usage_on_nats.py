"""The usage ledger on a real NATS: collectors that are killed, and a NATS that restarts, lose and repeat nothing."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.nats_bus import connect_nats
from shared.bus.port import BusError
from shared.contracts.channels import REPORT_USAGE, USAGE
from shared.contracts.ids import RouterId
from shared.contracts.usage import ReportUsage, UsageCounts, UsageRow
from tests.support.nats_server import free_port
from tests.support.processes import service_process

pytestmark = pytest.mark.nats

WAIT_S_MAX = 60.0
TRY_S_MAX = 5.0
REPORTS = 60
KEYS = 5
DAY = "2026-11-23"


@pytest.fixture
async def bus(nats_server):
    one = await connect_nats(nats_server.url, name="router")
    yield one
    await one.close()


def collector(nats_server, directory):
    return service_process("collector", directory, BATON_NATS_URL=nats_server.url, COLLECTOR_PORT=str(free_port()))


async def stored(bus, number: int) -> None:
    """As a router does: the report is repeated until it is stored."""
    rows = [
        UsageRow(day=DAY, tenant="acme", key=f"k{one}", model="m", counts=UsageCounts(requests=1, prompt_tokens=number))
        for one in range(KEYS)
    ]
    report = ReportUsage(router_id=RouterId("r1"), number=number, rows=rows)
    async with asyncio.timeout(WAIT_S_MAX):
        while True:
            try:
                await bus.ask(REPORT_USAGE, report, timeout_s=TRY_S_MAX)
            except BusError:
                await asyncio.sleep(0.02)
            else:
                return


async def totals(bus) -> set[tuple[int, int]]:
    entries = await (await bus.key_value_store(USAGE)).all(prefixes=("2026-11",))
    assert len(entries) == KEYS
    return {(one.value.total.requests, one.value.total.tokens) for one in entries}


async def test_a_killed_collector_and_a_restarted_nats_change_no_sum(nats_server, tmp_path, bus):
    with collector(nats_server, tmp_path) as first, collector(nats_server, tmp_path):
        await stored(bus, 1)
        for number in range(2, REPORTS // 2):
            await stored(bus, number)
        storing = asyncio.get_running_loop().create_task(stored(bus, REPORTS // 2))
        await asyncio.sleep(0)
        first.kill()
        await storing
        nats_server.kill()
        nats_server.start()
        for number in range(REPORTS // 2 + 1, REPORTS + 1):
            await stored(bus, number)

    with collector(nats_server, tmp_path):
        await stored(bus, REPORTS)  # The router has not heard that it was stored.

        assert await totals(bus) == {(REPORTS, REPORTS * (REPORTS + 1) // 2)}
