"""An engine of a data parallel group makes no other one wait: while they compute, it waits for no grant and no read."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from connector.messages import ConnectorSettings, EngineCall, Peer
from shared.contracts.kv_exchange import KvGroup, KvGroupKind
from tests.support.fleet_builders import FINGERPRINT
from tests.support.kv_engines import RankMemory, Shape, handshake


def reading_engine(*, others_compute: bool) -> tuple[Any, list[float]]:
    """One that connects to a peer and has nothing to compute, and how long it waited."""
    pytest.importorskip("vllm.distributed")
    from connector.messages import Results
    from connector.scheduler.connector_scheduler import ConnectorScheduler, EngineShape  # Imports vLLM.

    group = KvGroup(kind=KvGroupKind.FULL, block_size=16)
    settings = ConnectorSettings(worker_id="reader", epoch=1, fingerprint=FINGERPRINT)
    side = ConnectorScheduler(settings, EngineShape(16, 16, [group], ranks=1))
    inbox: queue.Queue[Any] = queue.Queue()
    waited: list[float] = []
    inbox.not_empty.wait = waited.append
    side.attach_to(SimpleNamespace(input_queue=inbox, execute_dummy_batch=lambda: None, engines_running=others_compute))
    side.share_process(lambda _orders: None, Results, lambda _wake: None)
    shape = Shape()
    peer = Peer(handshake=handshake([RankMemory(shape, 0).described()], shape), clock_ahead_s=0.0)
    side.exchange(msgspec.msgpack.encode(EngineCall(peers=[peer])))
    side.idle_wait.begin_step()
    return side, waited


def test_an_engine_that_computes_alone_sleeps_until_something_comes():
    side, waited = reading_engine(others_compute=False)

    side.wait_if_idle()
    side.wait_for_more()

    assert len(waited) == 2


def test_an_engine_whose_group_computes_never_waits():
    side, waited = reading_engine(others_compute=True)

    side.wait_if_idle()

    assert not side.wait_for_more()
    assert not waited


def test_nor_does_its_worker_role_in_another_process():
    side, _waited = reading_engine(others_compute=False)
    side.idle_wait.wakes_on_reads = False
    alone = side.step_orders(0).wait_s
    side._engine_core.engines_running = True

    assert (alone > 0, side.step_orders(0).wait_s) == (True, 0.0)
