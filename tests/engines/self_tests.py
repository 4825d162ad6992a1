"""Self-tests of running workers, and what their failures name."""

from __future__ import annotations

import re

from shared.bus.port import Bus
from shared.contracts.channels import RUN_SELF_TEST
from shared.contracts.fleet_orders import RunSelfTest, SelfTestResult
from shared.contracts.ids import WorkerId
from tests.support.worker_processes import WorkerProcess

TEST_S_MAX = 60.0
WRONG = re.compile(r"the KV of group (\d+) that was read has other bytes than at its holder")


async def run_self_test(bus: Bus, reader: str, holder: WorkerProcess) -> SelfTestResult:
    """The reader reads a prompt of the holder."""
    assert holder.record is not None
    ask = RunSelfTest(
        worker_id=WorkerId(reader), source_id=WorkerId(holder.worker_id), source_epoch=holder.record.epoch
    )
    return await bus.ask(RUN_SELF_TEST, ask, timeout_s=TEST_S_MAX)


def named(text: str) -> int | None:
    """The KV cache group that this failure names."""
    found = WRONG.search(text)
    return int(found[1]) if found else None
