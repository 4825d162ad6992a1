"""Real requests at other times: a trace stretched over hours, with day curves and a changing mix."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from statistics import median

import numpy as np

from replay.traces import Request

GRID_S = 1.0
"""The rate is held for so long."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """How a trace's requests are to come. Load 1 is the trace's own mean rate."""

    load: float = 1.0
    hours: float = 1.0
    swing: float = 0.0
    """A day begins with ``load * (1 - swing)`` and has ``load * (1 + swing)`` at noon; 0: always the same."""
    day_hours: float = 1.0
    turn_hours: float = 0.0
    """For half of so long come those with short answers to long prompts, for the other half the others; 0: mixed."""


def traffic(trace: list[Request], wanted: Traffic) -> list[Request]:
    """The trace's requests in its order, from the beginning again when it is over, with contents of their own then."""
    end_s, day_s = wanted.hours * 3600, wanted.day_hours * 3600
    at = np.arange(0.0, end_s + GRID_S, GRID_S)
    # The integral of the load: how much of the trace has come by then.
    so_far = wanted.load * (at - wanted.swing * day_s / math.tau * np.sin(at / day_s * math.tau))
    made = []
    for request in laps(trace):
        if request.at_s >= so_far[-1]:
            break
        made.append(replace(request, at_s=float(np.interp(request.at_s, so_far, at))))
    return turned(made, wanted.turn_hours * 3600) if wanted.turn_hours else made


def laps(trace: list[Request]) -> Iterator[Request]:
    """For ever."""
    lap_s = trace[-1].at_s * len(trace) / max(1, len(trace) - 1) or 1.0
    others = 1 + max((max(request.blocks, default=0) for request in trace), default=0)
    for lap in count():
        for request in trace:
            blocks = tuple(block + lap * others for block in request.blocks)
            yield replace(request, at_s=request.at_s + lap * lap_s, blocks=blocks)


def turned(requests: list[Request], turn_s: float) -> list[Request]:
    """At the same instants, first those with little to answer, then those with much, and so on."""
    middle = median(_answer_share(request) for request in requests)
    prompts = deque(request for request in requests if _answer_share(request) <= middle)
    answers = deque(request for request in requests if _answer_share(request) > middle)
    made = []
    for request in requests:
        wanted, other = (prompts, answers) if request.at_s % turn_s < turn_s / 2 else (answers, prompts)
        made.append(replace((wanted or other).popleft(), at_s=request.at_s))
    return made


def _answer_share(request: Request) -> float:
    return request.output_tokens / request.input_tokens
