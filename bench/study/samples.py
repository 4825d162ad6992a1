"""What each request of a run got, as arrays: the input of the statistics, kept with each run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from replay.legs import ReplayedRequest
from replay.traces import Request


@dataclass(frozen=True, slots=True)
class Samples:
    """One entry per request, in the order of the trace; a request that was not served is infinitely late."""

    due_s: np.ndarray
    """When it arrives, or in a closed loop would if answers took the planned time: the same for all policies."""
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    cached_tokens: np.ndarray
    fetched_tokens: np.ndarray

    def good(self, ttft_s: float, itl_s: float) -> np.ndarray:
        """Which requests met both targets."""
        return (self.ttft_s <= ttft_s) & (self.tpot_s <= itl_s)

    def encode(self) -> bytes:
        """Compressed."""
        out = io.BytesIO()
        np.savez_compressed(out, **{one.name: getattr(self, one.name) for one in fields(self)})
        return out.getvalue()


def decode(data: bytes) -> Samples:
    """What ``encode`` returned."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return Samples(**{one.name: arrays[one.name] for one in fields(Samples)})


def samples_of(requests: Sequence[Request], outcomes: Sequence[ReplayedRequest]) -> Samples:
    """``requests`` as they were given to the run, whose outcomes are in the same order."""
    served = [replayed.finished_at is not None for replayed in outcomes]

    def column(values: list[float]) -> np.ndarray:
        return np.array(values, dtype=np.float32)

    return Samples(
        due_s=np.array([request.at_s for request in requests]),
        prompt_tokens=column([replayed.request.input_tokens for replayed in outcomes]),
        output_tokens=column([replayed.request.output_tokens for replayed in outcomes]),
        ttft_s=column([one.ttft_s if was else np.inf for one, was in zip(outcomes, served, strict=True)]),
        tpot_s=column([one.tpot_s if was else np.inf for one, was in zip(outcomes, served, strict=True)]),
        cached_tokens=column([replayed.cached_tokens for replayed in outcomes]),
        fetched_tokens=column([replayed.fetched_tokens for replayed in outcomes]),
    )
