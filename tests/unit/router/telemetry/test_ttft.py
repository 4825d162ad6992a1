"""The parts of the TTFT in each serving mode."""

from __future__ import annotations

import pytest

from services.router.request.timings import Timings
from services.router.telemetry.ttft import Legs, exchanging_s, ttft_parts, ttft_s
from shared.contracts.decisions import TtftParts
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import LegReport
from shared.contracts.kv_exchange import KvRead, KvTransferReport

ROUTER = Timings(admission_s=0.5, tokenize_s=0.02, place_s=0.001, failed_s=0.25)


def read(asked: float, granted: float = 0.0, begun: float = 0.0, ended: float = 0.0, **fields) -> KvRead:
    return KvRead(
        worker_id=WorkerId("s"),
        epoch=Epoch(1),
        requested_at=asked,
        granted_at=granted,
        read_at=begun,
        ended_at=ended,
        **fields,
    )


def report(queue_s: float, prefill_s: float, *reads: KvRead, extra_s: float = 0.004, **fields) -> LegReport:
    first = queue_s + prefill_s + extra_s
    transfer_report = KvTransferReport(reads=list(reads))
    return LegReport(
        queue_s=queue_s, prefill_s=prefill_s, first_token_s=first, kv=transfer_report, **{"total_s": first, **fields}
    )


def rounded(parts: TtftParts) -> dict[str, float]:
    values = {name: round(getattr(parts, name), 9) for name in parts.__struct_fields__}
    return {name: value for name, value in values.items() if value}


def test_aggregated_ttft_is_queue_fetch_prefill_and_front_end():
    legs = Legs(answering=report(0.3, 0.2, read(100.0, 100.01, 100.05, 100.14)))

    parts = ttft_parts(1.3, ROUTER, legs)

    assert rounded(parts) == {
        "admission_s": 0.5,
        "tokenize_s": 0.02,
        "place_s": 0.001,
        "failed_s": 0.25,
        "queue_s": 0.2,  # The time between grant and read is spent in the queue, waiting for free blocks.
        "fetch_s": 0.1,
        "prefill_s": 0.2,
        "front_end_and_bus_s": 0.029,
    }
    assert parts.total_s() == pytest.approx(1.3, abs=1e-12)


def test_disaggregated_ttft_includes_the_handoff():
    prefill = report(0.1, 0.4, total_s=0.51)
    decode = report(0.06, 0.03, read(7.0, 7.0, 7.01, 7.05))

    parts = ttft_parts(0.62, Timings(), Legs(answering=decode, prefill=prefill))

    assert rounded(parts) == {
        "queue_s": 0.1,
        "prefill_s": 0.4,
        "handoff_s": 0.04,
        "decode_queue_s": 0.02,
        "decode_prefill_s": 0.03,
        "front_end_and_bus_s": 0.03,
    }


def test_only_handoff_time_after_a_streamed_prefill_counts():
    prefill = report(0.1, 2.0)  # Computed 2.104 s after its leg came.
    decode = report(2.144, 0.03, read(50.0, 50.1, 50.2, 52.14, followed=True))  # Scheduled at 2.148 s.

    parts = ttft_parts(2.2, Timings(), Legs(answering=decode, prefill=prefill, streamed=True))

    assert rounded(parts) == {
        "queue_s": 0.1,
        "prefill_s": 2.0,
        "handoff_s": 0.044,
        "decode_prefill_s": 0.03,
        "front_end_and_bus_s": 0.026,
    }


def test_waiting_for_a_full_decode_worker_counts_as_queue():
    prefill = report(0.0, 0.5)
    decode = report(3.0, 0.03, read(90.0, 90.001, 90.001, 90.101, followed=True))  # Requested once blocks were free.

    parts = ttft_parts(3.1, Timings(), Legs(answering=decode, prefill=prefill, streamed=True))

    assert parts.handoff_s == pytest.approx(0.101)
    assert parts.decode_queue_s == pytest.approx(3.004 - 0.504 - 0.101)


def test_an_early_decode_leg_counts_from_the_prefills_sampled_token():
    prefill = report(0.1, 1.0)
    decode = report(1.05, 0.03, read(5.0, 5.1, 5.1, 6.04, followed=True), extra_s=0.0)

    parts = ttft_parts(1.1, Timings(), Legs(answering=decode, prefill=prefill, streamed=True))

    assert parts.prefill_s == pytest.approx(1.0 - (1.104 - 1.05))
    assert parts.handoff_s == parts.decode_queue_s == 0
    assert parts.total_s() == pytest.approx(1.1)


def test_a_decode_worker_with_all_kv_has_no_prefill_time():
    parts = ttft_parts(0.1, Timings(), Legs(answering=report(0.02, 0.03), prefill=report(0.5, 2.0), streamed=True))

    assert rounded(parts) == {"decode_queue_s": 0.02, "decode_prefill_s": 0.03, "front_end_and_bus_s": 0.05}


def test_without_a_prefill_report_the_kv_wait_is_handoff():
    decode = report(1.0, 0.03, read(5.0, 5.5, 5.5, 5.9, followed=True))

    parts = ttft_parts(1.1, Timings(), Legs(answering=decode, streamed=True))

    assert (parts.prefill_s, parts.handoff_s) == (0.0, pytest.approx(0.9))
    assert parts.decode_queue_s == pytest.approx(0.1)


def test_unstreamed_responses_have_the_ttft_of_a_stream():
    answering = LegReport(first_token_s=0.4, total_s=2.4)

    assert ttft_s(2.5, answering, stream=False) == pytest.approx(0.5)
    assert ttft_s(2.5, answering, stream=True) == 2.5
    assert ttft_s(2.5, LegReport(total_s=2.4), stream=False) == 2.5
    assert ttft_s(2.5, None, stream=False) == 2.5
    assert ttft_s(1.5, answering, stream=False) == 0.0


def test_worker_parts_longer_than_the_ttft_are_scaled_down():
    parts = ttft_parts(1.0, Timings(tokenize_s=0.1), Legs(answering=report(0.6, 1.2)))

    assert rounded(parts) == {"tokenize_s": 0.1, "queue_s": 0.3, "prefill_s": 0.6}


def test_the_routers_parts_never_exceed_the_ttft():
    parts = ttft_parts(0.1, ROUTER, Legs(answering=report(0.6, 1.2)))

    assert parts.total_s() == pytest.approx(0.1)
    assert (parts.queue_s, parts.prefill_s, parts.front_end_and_bus_s) == (0, 0, 0)


def test_parallel_fetches_count_once_and_later_refetches_not_at_all():
    reads = [read(10.0, 10.1, 10.1, 10.5), read(10.0, 10.2, 10.4, 10.7), read(25.0, 25.1, 25.1, 26.0), read(0.0)]

    assert exchanging_s(report(1.0, 0.1, *reads)) == pytest.approx(0.7)


def test_a_fetch_does_not_exceed_its_queue_time():
    assert exchanging_s(report(0.3, 0.1, read(10.0, 10.1, 10.1, 15.0))) == pytest.approx(0.3)
