"""The report of a finished request: its workers' KV reads, and what was cached of its prompt."""

from __future__ import annotations

import pytest

from services.router.request.facts import Mode
from services.router.telemetry.request_log import cached_tokens, kv_moves
from shared.contracts.inference import KV_MOVES_MAX, KvMoved, LegReport
from shared.contracts.kv_exchange import KvRead, KvTransferReport


def report(*reads):
    kv_reads = [KvRead(worker_id=source, epoch=1, tokens=tokens, bytes=tokens * 8) for source, tokens in reads]
    return LegReport(kv=KvTransferReport(reads=kv_reads))


def test_kv_reads_are_reported_with_source_and_reader():
    moves = kv_moves(report(("d1", 32), ("s1", 64)), "p1", report(("p1", 128)), "d1")

    assert moves == [
        KvMoved(source_id="d1", reader_id="p1", tokens=32, bytes=256),
        KvMoved(source_id="s1", reader_id="p1", tokens=64, bytes=512),
        KvMoved(source_id="p1", reader_id="d1", tokens=128, bytes=1024),
    ]


def test_reported_kv_reads_are_bounded_and_exclude_failed_or_unknown():
    assert kv_moves(None, "", LegReport(), "d1") == []
    assert kv_moves(report(("d1", 0)), "p1", LegReport(), "d1") == []
    assert len(kv_moves(None, "", report(*[("p1", 32)] * 20), "d1")) == KV_MOVES_MAX


PREFILL = LegReport(prompt_tokens=90, cached_tokens=64, completion_tokens=1)


def decoded(prefill_cached_tokens: int) -> LegReport:
    told = KvTransferReport(prompt_tokens=90, prefill_cached_tokens=prefill_cached_tokens)
    return LegReport(prompt_tokens=90, cached_tokens=32, completion_tokens=3, kv=told)


@pytest.mark.parametrize(
    ("prefill", "answering", "expected"),
    [(PREFILL, decoded(48), 64), (None, decoded(48), 48), (None, decoded(0), 0), (None, decoded(-1), 32)],
    ids=["the prefill leg has reported", "the decode worker was told", "of nothing cached", "nobody told it"],
)
def test_cached_tokens_are_those_of_the_worker_that_computed_the_prompt(prefill, answering, expected):
    assert cached_tokens(prefill, answering, Mode.DISAGGREGATED) == expected
