"""A router's health report names exactly the workers that it cannot place by their cache."""

from __future__ import annotations

from services.router.state.prefix_index import PrefixIndex
from services.router.telemetry.metrics import health_of
from services.router.tokenize.parity import Parity, ParityBook
from shared.contracts.control import ROUTER_TROUBLES_MAX
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import KvSnapshot


def known(index: PrefixIndex, name: str) -> WorkerId:
    worker = WorkerId(name)
    index.join(worker, Epoch(1))
    index.restore(KvSnapshot(worker_id=worker, epoch=Epoch(1), seq=0, hashes=b""))
    return worker


def test_a_router_with_exact_knowledge_reports_no_worker():
    index, parity = PrefixIndex(), ParityBook()
    worker = known(index, "w1")
    parity.seen(worker, Epoch(1), "f")
    parity.found(worker, Epoch(1), Parity.AGREES, 0.0)

    health = health_of(index, parity)

    assert health.not_exact == {}
    assert health.tokens_differ == []


def test_health_names_workers_with_unknown_cache_or_different_tokens():
    index, parity = PrefixIndex(), ParityBook()
    known(index, "w1")
    doubted, strange, other = known(index, "w2"), WorkerId("w3"), WorkerId("w4")
    tell = lambda: health_of(index, parity)  # noqa: E731

    index.doubt(doubted)
    index.join(strange, Epoch(1))
    index.give_up(strange)
    parity.seen(other, Epoch(1), "f")
    parity.found(other, Epoch(1), Parity.DIFFERS, 0.0)

    health = tell()
    assert health.not_exact == {doubted: "degraded", strange: "fallback"}
    assert health.tokens_differ == [other]


def test_reported_worker_names_are_bounded():
    index = PrefixIndex()
    for number in range(2 * ROUTER_TROUBLES_MAX):
        index.join(WorkerId(f"w{number}"), Epoch(1))

    assert len(health_of(index, ParityBook()).not_exact) == ROUTER_TROUBLES_MAX
