"""A receiver may read a part of a channel's message."""

from __future__ import annotations

import msgspec
import pytest

from shared.bus.wire import pack, unpack
from shared.contracts.channels import KV_EVENTS, LOAD
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import KvDigest
from shared.contracts.kv_exchange import KvExchangeState
from shared.contracts.load import LoadReport, StepTotals, WorkerLoad
from shared.contracts.workers import Role, WorkerPhase

REPORT = LoadReport(
    worker_id=WorkerId("w1"),
    epoch=Epoch(3),
    role=Role.DECODE,
    phase=WorkerPhase.READY,
    running=2,
    digest=KvDigest(seq=1, count=2, xor=3),
    computed_tokens_total=9,
    exchange=KvExchangeState(leases=1),
    steps=StepTotals(seconds=1.0),
    adapters_running=["sql"],
)


def test_a_part_of_a_message_has_its_fields_and_its_subject():
    part = unpack(pack(REPORT), WorkerLoad)

    assert type(part) is WorkerLoad
    assert LOAD.read_as(WorkerLoad).address(part) == LOAD.address(REPORT) == "worker.w1.load"
    for name in WorkerLoad.__struct_fields__:
        if name != "exchange":
            assert getattr(part, name) == getattr(REPORT, name)
    assert part.exchange is not None
    assert unpack(pack(msgspec.structs.replace(REPORT, exchange=None)), WorkerLoad).exchange is None


def test_a_message_of_another_channel_is_no_part():
    with pytest.raises(TypeError):
        KV_EVENTS.read_as(WorkerLoad)
