"""The engines' time that a finished request took, by the step times that their workers have learned and published."""

from __future__ import annotations

from typing import NamedTuple

from services.router.placement import cost
from services.router.placement.placement import Placement
from services.router.state import fleet_table as t
from services.router.state.cluster_view import ClusterView
from services.router.state.worker_view import WorkerView
from shared.contracts.inference import RequestFinished

RANKS_MAX = 1024
"""Of an engine, whatever a faulty worker says."""


class UsedTokens(NamedTuple):
    """Of one finished request."""

    prompt: int
    cached: int
    completion: int
    sequences: int


def engine_seconds(
    cluster: ClusterView, placement: Placement, finished: RequestFinished, used: UsedTokens
) -> tuple[float, float]:
    """Prefill and decode, each times the engine's ranks. Of a decode step, whose fixed cost all requests of the batch
    share, the request's share in the batch at its end; 0.0 for a worker that is gone. The prefill gives each completion
    its first token.
    """
    computing = placement.prefill or placement.decode
    elsewhere = finished.received_tokens if placement.prefill is None else -1
    fetched = max(0, finished.readback_tokens, elsewhere)
    computed = max(0, used.prompt - used.cached - fetched)
    n = _numbers(cluster, placement.decode)
    first = n if computing is placement.decode else _numbers(cluster, computing)
    ranks = _ranks(placement.decode)
    prefill_s = _prefill_s(first, computed, used.prompt - computed) * _ranks(computing)
    again = max(0, finished.recomputed_tokens) + max(0, finished.reprefilled_tokens)
    prefill_s += _prefill_s(n, again, max(0, used.prompt - again)) * ranks
    return prefill_s, _decode_s(n, used) * ranks


def _ranks(view: WorkerView) -> int:
    return max(1, min(view.record.ranks, RANKS_MAX))


def _numbers(cluster: ClusterView, view: WorkerView) -> list[float] | None:
    """Of a worker that is not gone, as floats of Python: arithmetic on numpy's is several times slower."""
    alive = cluster.workers.get(view.record.worker_id) is view
    return cluster.table.numbers[:, view.row].tolist() if alive else None


def _prefill_s(n: list[float] | None, computed: int, before: int) -> float:
    return float(cost.work_s(n, computed, before)) if n is not None and computed else 0.0


def _decode_s(n: list[float] | None, used: UsedTokens) -> float:
    if n is None:
        return 0.0
    context_tokens = used.prompt + used.completion / 2
    batch = max(1.0, n[t.DECODING])
    step_s = n[t.DECODE_STEP_S] / batch + n[t.DECODE_REQUEST_S] + n[t.DECODE_CONTEXT_TOKEN_S] * context_tokens
    return float(step_s) * max(0, used.completion - used.sequences)
