"""The KV self-test of real engines with windows and states: a zero in what was read of any one KV cache group is refused, and
the refusal names that group. A request's tokens may not show a missing state.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus
from shared.contracts.channels import KV_HANDSHAKE, WORKER_RECORDS
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import AskKvHandshake, KvGroupKind
from shared.contracts.workers import WorkerPhase, WorkerRecord
from tests.engines.forged_reads import Forgery, spoil, spoiled
from tests.engines.self_tests import named
from tests.nightly.engines.test_self_test import HOLDER, Workers, forging_pair, run
from tests.support.model_families import FAMILIES, make_model
from tests.support.worker_processes import READY_S_MAX, wait_ready

pytestmark = [pytest.mark.vllm, pytest.mark.nats]


STATE_OR_WINDOW = {
    "qwen3-next": 2,
    "granite-4": 0,
    "nemotron-h": 1,
    "falcon-h1": 1,
    "lfm2": 0,
    "gemma-3": 4,
    "gemma-4": 4,
}
"""The number of such a group, as vLLM orders them."""


@pytest.mark.parametrize(("family", "group"), STATE_OR_WINDOW.items())
async def test_a_worker_whose_state_or_window_comes_over_zeroed_is_refused(family: str, group: int, tmp_path: Path):
    """At its start, until it comes over right; after that, in a self-test for each of the groups."""
    file, of = tmp_path / "forgery", FAMILIES[family]
    spoil(file, Forgery.ZEROED, group, of.groups)
    with forging_pair(tmp_path, make_model(family, tmp_path), file) as workers:
        bus = await connect_nats(workers[0], name="self-tests", connect_s_max=30.0)
        try:
            refused = await until_refused(bus, workers)
            assert named(refused.note) == group, refused
            spoil(file)
            await wait_ready(*workers)
            found = []
            for each in range(of.groups):
                with spoiled(file, Forgery.ZEROED, each, of.groups):
                    found.append(named((await run(bus, workers)).failure))
            assert found == list(range(of.groups))
            assert not (await run(bus, workers)).failure
            ask = AskKvHandshake(worker_id=WorkerId(HOLDER), reader_id=WorkerId("test"))
            groups = (await bus.ask(KV_HANDSHAKE, ask, timeout_s=30.0)).groups
            assert groups[group].kind is (KvGroupKind.STATE if of.states else KvGroupKind.WINDOW), groups
        finally:
            await bus.close()


async def until_refused(bus: Bus, workers: Workers) -> WorkerRecord:
    """The record of the later one of the two, when it tells a failed self-test. The first has no partner at its start."""
    records = await bus.key_value_store(WORKER_RECORDS)
    async with asyncio.timeout(READY_S_MAX):
        while True:
            for worker in workers[1]:
                assert worker.process.poll() is None, worker.log.read_text()
                found = await records.get(worker.worker_id)
                if found and found.value and found.value.phase is WorkerPhase.PROBING and found.value.note:
                    return found.value
            await asyncio.sleep(0.2)
