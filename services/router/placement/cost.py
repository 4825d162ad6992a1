"""The predicted time of a request on a worker, in seconds, from the learned speed of the worker's engine.

Only tokens that must be computed count as work. A request's cost is its own time plus the time that it adds to other
requests, so both have the same unit and need no weights. A decode step costs nothing as long as it is within the
client's target between tokens, or without a target, as long as the batch is uncrowded (``UNCROWDED``). Prompts that are
computed between the steps do not count: how many a worker computed lately says little about the next seconds, which
placement decides itself, and counting them sends requests away from the workers with their cache.

``n`` holds the numbers of ``fleet_table``: of one worker, or an array of each for many. ``Arithmetic`` has the
operations that differ between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from services.router.state import fleet_table as t

TAIL_TOKENS = 16
"""The prompt's last, partial block of KV is not handed over: half a block on average."""
TOKENS_OUT_UNKNOWN = 256
"""Completion length assumed when the client sets no limit."""
TOKENS_OUT_COUNTED_MAX = 1024
"""Clients set generous limits and seldom reach them: of a higher limit, only this many tokens are counted."""
BUSY_MAX = 0.9
"""At most this share of an engine's time is assumed to go to prompts: near 1 the predicted decode time is infinite."""
UNCROWDED = 5.0
"""Without a target, a decode step costs nothing while it takes at most this many times as long as one of this request
alone on the fastest free worker. Sarathi-Serve (Agrawal et al., OSDI 2024, section 5.1) derives its strict target from
the engine's decode step in the same way, with the same factor.
"""

Value = Any
"""A float, or an array of them."""


class Arithmetic(NamedTuple):
    """On single numbers, or on arrays of them."""

    choose: Callable[[Value, Value, Value], Value]
    least: Callable[[Value, Value], Value]
    most: Callable[[Value, Value], Value]


def _choose(condition: Value, one: Value, other: Value) -> Value:
    return one if condition else other


SINGLE = Arithmetic(_choose, min, max)
ARRAYS = Arithmetic(np.where, np.minimum, np.maximum)


class Prompt(NamedTuple):
    """The numbers of a request that its cost depends on."""

    tokens: int
    tokens_out: int
    """Expected length of the completion."""
    streams: bool
    """Whether the decode worker would read the KV while the prompt is computed."""
    now: float
    eviction_price: float
    """See ``eviction_price``."""
    itl_free_s: float
    """Seconds of a decode step that cost nothing: the target, or without one, ``uncrowded_itl_s``."""


class PrefillEstimate(NamedTuple):
    """Tokens and seconds until the prompt's KV is on a worker."""

    cached: Value
    fetched: Value
    computed: Value
    queue_s: Value
    fetch_s: Value
    prefill_s: Value
    others_s: Value
    """Added to requests that decode there, and to later ones, which compute again what this prompt evicts."""

    def ttft_s(self) -> Value:
        return self.queue_s + self.fetch_s + self.prefill_s


class DecodeEstimate(NamedTuple):
    """Seconds for the completion on a worker. The first two apply only where another worker computes the prompt."""

    handoff_s: Value
    queue_s: Value
    kv_wait_s: Value
    """Until other requests end, where the KV cache has no space before."""
    decode_s: Value
    within_s: Value
    """The part of ``decode_s`` that costs nothing."""
    itl_s: Value
    step_s: Value
    """A decode step with this request in the batch: ``itl_s`` without the prompts that are computed in between."""
    first_s: Value
    """The step that computes the prompt's tail, and with it the first token that this worker samples."""
    others_s: Value


class BatchEstimate(NamedTuple):
    """The steps of a worker's batch with this request in it."""

    between_s: Value
    """Added to each prompt token by the decodes that share its steps."""
    step_s: Value
    """One step of the requests that decode; 0 where none does."""
    itl_s: Value
    full_step_s: Value
    """One step with this request, too."""
    more_s: Value
    """By how much this request slows each step."""
    excess_s: Value
    """The part of such a step that costs something."""
    disturbed: Value
    """Requests that decode there, if a part of the step costs something; else 0."""
    queue_s: Value
    """Until a new prompt is begun."""


def tokens_out_expected(limit: int) -> int:
    """Completion length to count with, for a client's limit in tokens (0: none)."""
    return min(limit or TOKENS_OUT_UNKNOWN, TOKENS_OUT_COUNTED_MAX)


def uncrowded_itl_s(numbers: np.ndarray[Any, np.dtype[np.float64]], tokens: int, tokens_out: int) -> float:
    """The decode step that costs nothing to such a request without a target. ``numbers``: rows of ``fleet_table``
    from ``DECODE_STEP_S`` to ``DECODE_CONTEXT_TOKEN_S``, of the free workers that decode; infinite when there are none.
    """
    step_s, request_s, context_token_s = numbers
    alone_s = step_s + (request_s + context_token_s * (tokens + tokens_out // 2))
    # NaN is left out, and the sum makes a negative zero positive: both as in C.
    return UNCROWDED * (float(np.fmin.reduce(alone_s, initial=np.inf)) + 0.0)


def eviction_price(numbers: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """What a token costs that another one evicts, in tokens computed again. ``numbers``: all rows of ``fleet_table``,
    of the free workers that compute prompts.

    As many are computed again as the caches have been of use for each token stored in them, but each once: then it is
    cached again. While engines are busy, a second of work keeps others waiting for longer: it lengthens a busy period
    by 1 / (1 - load) seconds (Kleinrock, "Queueing Systems", volume I, section 5.8).
    """
    busy = np.minimum(numbers[t.PROMPTS_PER_S] * mean_token_s(numbers), BUSY_MAX)
    stored, used, busy_sum = map(_sum, (numbers[t.STORED_TOKENS], numbers[t.USED_TOKENS], busy))
    if not (used > 0.0 and stored > 0.0):
        return 0.0
    return min(1.0, used / stored) / (1.0 - busy_sum / len(busy))


def _sum(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """One after the other, as C does."""
    return float(np.cumsum(np.append(0.0, values))[-1])


def work_s(n: Value, computed: Value, cached: Value) -> Value:
    """The engine's time for ``computed`` prompt tokens behind ``cached`` ones."""
    pairs = computed * (cached + 0.5 * computed)
    return n[t.PREFILL_STEP_S] + n[t.PREFILL_TOKEN_S] * computed + n[t.PREFILL_PAIR_S] * pairs


def estimate_batch(n: Value, prompt: Prompt, do: Arithmetic) -> BatchEstimate:
    token_s = mean_token_s(n)
    tokens = prompt.tokens + prompt.tokens_out // 2
    more_s = n[t.DECODE_REQUEST_S] + n[t.DECODE_CONTEXT_TOKEN_S] * tokens
    decoding = n[t.DECODING]
    step_s = n[t.DECODE_STEP_S] + n[t.DECODE_REQUEST_S] * decoding + n[t.DECODE_CONTEXT_TOKEN_S] * n[t.CONTEXT_TOKENS]
    full_step_s = step_s + more_s
    itl_s = full_step_s / (1.0 - do.least(n[t.PROMPTS_PER_S] * token_s, BUSY_MAX))
    excess_s = do.most(full_step_s - prompt.itl_free_s, 0.0)
    disturbed = do.choose(full_step_s > prompt.itl_free_s, decoding * n[t.ANSWERS], 0.0)
    shared_s = do.choose(decoding > 0, step_s, 0.0)
    between_s = shared_s / n[t.STEP_TOKENS]
    queue_s = waiting_s(n, token_s + between_s, shared_s, prompt.now, do)
    return BatchEstimate(between_s, shared_s, itl_s, full_step_s, more_s, excess_s, disturbed, queue_s)


def mean_token_s(n: Value) -> Value:
    """The engine's time for each prompt token, for prompts of the mean length on that worker."""
    each_s = n[t.PREFILL_TOKEN_S] + n[t.PREFILL_PAIR_S] * n[t.PAIRS_PER_TOKEN]
    return each_s + n[t.PREFILL_STEP_S] / n[t.STEP_TOKENS]


def waiting_s(n: Value, token_s: Value, step_s: Value, now: float, do: Arithmetic) -> Value:
    """Until a new prompt is begun, at ``token_s`` for each token before it. The engine has worked on the
    reported tokens since its report. With no prompt before it, a new one waits for half a decode step on average.
    """
    reported_s = (n[t.WAITING_TOKENS] - n[t.SENT_TOKENS]) * token_s
    left_s = do.most(reported_s - (now - n[t.HEARD_AT]), 0.0) + n[t.SENT_TOKENS] * token_s
    return do.most(left_s, 0.5 * step_s)


def estimate_prefill(
    n: Value, prompt: Prompt, held: Value, reachable: Value, batch: BatchEstimate, do: Arithmetic
) -> PrefillEstimate:
    """For a worker that holds ``held`` of the prompt's tokens and could have ``reachable`` with another worker's KV. It
    fetches where that is predicted to end sooner. Tokens that it does not hold yet evict as many others, computed or
    fetched.
    """
    own_s, fetched = work_s(n, prompt.tokens - held, held), held - held
    fetch_s: Value = 0.0
    if reachable is not held:
        missing = reachable - held
        reading_s = n[t.TRANSFER_BASE_S] + n[t.TRANSFER_TOKEN_S] * missing
        rest_s = work_s(n, prompt.tokens - reachable, reachable)
        worth = (missing > 0) & (reading_s + rest_s < own_s)
        own_s = do.choose(worth, rest_s, own_s)
        fetched = do.choose(worth, missing, 0)
        fetch_s = do.choose(worth, reading_s, 0.0)
    computed = prompt.tokens - held - fetched
    prefill_s = own_s + computed * batch.between_s
    others_s = own_s * batch.disturbed + prompt.eviction_price * n[t.PREFILL_TOKEN_S] * (prompt.tokens - held)
    return PrefillEstimate(held, fetched, computed, batch.queue_s, fetch_s, prefill_s, others_s)


def estimate_decode(n: Value, prompt: Prompt, held: Value, batch: BatchEstimate, do: Arithmetic) -> DecodeEstimate:
    """For a worker that holds ``held`` of the prompt's tokens."""
    missing = prompt.tokens - held
    exposed = do.least(missing, n[t.STEP_TOKENS]) if prompt.streams else missing
    out = prompt.tokens_out
    decode_s = out * batch.itl_s
    crowded = n[t.FREE_TOKENS] < prompt.tokens + out
    return DecodeEstimate(
        n[t.TRANSFER_BASE_S] + n[t.TRANSFER_TOKEN_S] * exposed,
        batch.queue_s,
        do.choose(crowded, decode_s, 0.0),
        decode_s,
        decode_s - out * batch.excess_s,
        batch.itl_s,
        batch.full_step_s,
        n[t.PREFILL_STEP_S] + n[t.PREFILL_TOKEN_S] * TAIL_TOKENS + batch.step_s,
        out * batch.more_s * batch.disturbed,
    )


class Cost(NamedTuple):
    """What placement compares, for each part that a worker may serve."""

    prefill_s: Value
    decode_s: Value
    whole_s: Value


def cost(n: Value, prefill: PrefillEstimate, decode: DecodeEstimate) -> Cost:
    """The request's own time and what it adds to that of others."""
    prefill_s = prefill.ttft_s() + prefill.others_s + n[t.TRANSIT_S]
    rest_s = decode.kv_wait_s + decode.decode_s - decode.within_s + decode.others_s
    return Cost(
        prefill_s, decode.handoff_s + decode.queue_s + decode.first_s + n[t.TRANSIT_S] + rest_s, prefill_s + rest_s
    )


Estimate = tuple[PrefillEstimate, DecodeEstimate, Cost]


def estimate(n: Value, prompt: Prompt, held: Value, reachable: Value, do: Arithmetic) -> Estimate:
    """All predictions for this request there. ``reachable is held`` says that no other worker can help."""
    batch = estimate_batch(n, prompt, do)
    prefill = estimate_prefill(n, prompt, held, reachable, batch, do)
    decode = estimate_decode(n, prompt, held, batch, do)
    return prefill, decode, cost(n, prefill, decode)
