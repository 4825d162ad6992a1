"""The step-time models that the engines' published speed leaves open, for the disaggregation report.

Where batches have hardly varied, the cost of a decode step cannot be separated from the cost of each request in it:
``batch_spread`` is large. Then two models bound what larger batches may cost. Both agree on the observed batches.
"""

from __future__ import annotations

import math

from shared.contracts.load import EngineSpeed
from shared.engine_speed.learner import is_measured
from shared.engine_speed.steps import Steps, StepTimeModel

SAMPLES_MIN = 20.0
DEVIATIONS = 2.0
"""The bounds are so many standard deviations from the estimate."""
OPEN_MIN = 0.15
"""Bounds of a decode step's variable part that differ by less, as a share of the step, count as one model."""


def step_time_models(speed: EngineSpeed | None, work: Steps) -> tuple[StepTimeModel, ...]:
    """None while too little is measured, one, or two bounds. ``work``: of all engines.

    The cost of context is part of the cost of a request, at the mean context of ``work``.
    """
    if speed is None or speed.prefill_samples + speed.decode_samples < SAMPLES_MIN or not is_measured(speed)[1]:
        return ()
    times = StepTimeModel.of(speed)
    if not work.decode_steps or not work.decode_requests:
        return (times,)
    batch, context = work.decode_requests / work.decode_steps, work.decode_context_tokens / work.decode_requests
    request_s = times.decode_request_s + context * times.decode_context_token_s
    step_s = times.decode_step_of(batch, context)
    factor = math.exp(DEVIATIONS * speed.batch_spread)
    low, high = request_s / factor, min(request_s * factor, step_s / batch)
    if (high - low) * batch < OPEN_MIN * step_s:
        return (_with(times, step_s - batch * request_s, request_s),)
    return _with(times, step_s - batch * low, low), _with(times, max(0.0, step_s - batch * high), high)


def _with(times: StepTimeModel, decode_step_s: float, decode_request_s: float) -> StepTimeModel:
    return times._replace(decode_step_s=decode_step_s, decode_request_s=decode_request_s, decode_context_token_s=0.0)
