"""How long would it take on this worker? Predicted seconds from what was learned of it.

Only tokens that have to be computed count as work. A worker's time is everybody's: beside its own time, a request
costs what it adds to that of others, and so nothing needs a weight. Time between tokens costs nothing as long as it is
within the target: nobody waits for them there. ``n`` holds the numbers of ``fleet_table``: of one
worker, or an array of each for many; ``Arithmetic`` has what differs between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from services.router.state import fleet_table as t

TAIL_TOKENS = 16
"""Of a prompt, what fills no block of KV and so is not handed over: half a block."""
TOKENS_OUT_UNKNOWN = 256
"""Completion length assumed when the client sets no limit."""
TOKENS_OUT_COUNTED_MAX = 1024
"""Limits are set generously and seldom reached: more than this is not believed."""
BUSY_MAX = 0.9
"""No worker is believed to spend more of its time on prompts: its decodes would never end."""

Value = Any
"""A float, or an array of them."""


class Arithmetic(NamedTuple):
    """On single numbers, or on arrays of them."""

    choose: Callable[[Value, Value, Value], Value]
    least: Callable[[Value, Value], Value]
    most: Callable[[Value, Value], Value]


def _choose(condition: bool, one: float, other: float) -> float:
    return one if condition else other


SINGLE = Arithmetic(_choose, min, max)
ARRAYS = Arithmetic(np.where, np.minimum, np.maximum)


class Prompt(NamedTuple):
    """A request in numbers."""

    tokens: int
    tokens_out: int
    """Of the completion, as far as a limit is believed."""
    streams: bool
    """Whether decode would read its KV while it is computed."""
    now: float
    itl_target_s: float
    """Between tokens, seconds; 0 where there is no target: then all of that time counts."""


class Computing(NamedTuple):
    """What it takes to have the prompt's KV on a worker: tokens and seconds."""

    cached: Value
    fetched: Value
    computed: Value
    queue_s: Value
    fetch_s: Value
    prefill_s: Value
    others_s: Value

    def ttft_s(self) -> Value:
        """Until the prompt is computed, and with it the first token."""
        return self.queue_s + self.fetch_s + self.prefill_s


class Answering(NamedTuple):
    """What it takes to make the completion on a worker. The first two only where another one computes the prompt."""

    handoff_s: Value
    queue_s: Value
    room_s: Value
    """Until others have ended, if its KV has no room before."""
    decode_s: Value
    within_s: Value
    """Of ``decode_s``, what is within the target."""
    itl_s: Value
    first_s: Value
    """The step that computes the prompt's tail, and with it the first token."""
    others_s: Value


def tokens_out_believed(asked: int) -> int:
    """Completion length to count with, for a limit of ``asked`` tokens (0: none)."""
    return min(asked or TOKENS_OUT_UNKNOWN, TOKENS_OUT_COUNTED_MAX)


class Pace(NamedTuple):
    """How a worker's batch goes on."""

    between_s: Value
    """What the decodes that share its steps add to each prompt token."""
    step_s: Value
    """One step of those that decode; 0 where nobody does."""
    itl_s: Value
    more_s: Value
    """By how much this request slows each step."""
    minding: Value
    """Requests that decode there and mind that it comes."""
    queue_s: Value
    """Until a new prompt is begun."""


def work_s(n: Value, computed: Value, cached: Value) -> Value:
    """The engine's time for a prompt, of which some is cached or comes from elsewhere."""
    pairs = computed * (cached + 0.5 * computed)
    return n[t.PREFILL_BASE_S] + n[t.PREFILL_S_PER_TOKEN] * computed + n[t.PREFILL_S_PER_PAIR] * pairs


def pace(n: Value, prompt: Prompt, do: Arithmetic) -> Pace:
    """How the batch goes on with this request in it."""
    usual_s = usual_token_s(n)
    tokens = prompt.tokens + prompt.tokens_out // 2
    more_s = n[t.DECODE_S_PER_REQUEST] + n[t.DECODE_S_PER_CONTEXT_TOKEN] * tokens
    decoding = n[t.DECODING]
    step_s = (
        n[t.DECODE_BASE_S]
        + n[t.DECODE_S_PER_REQUEST] * decoding
        + n[t.DECODE_S_PER_CONTEXT_TOKEN] * n[t.CONTEXT_TOKENS]
    )
    itl_s = (step_s + more_s) / (1.0 - do.least(n[t.PROMPTS_PER_S] * usual_s, BUSY_MAX))
    minding = do.choose(itl_s > prompt.itl_target_s, decoding * n[t.ANSWERS], 0.0)
    shared_s = do.choose(decoding > 0, step_s, 0.0)
    between_s = shared_s / n[t.STEP_TOKENS]
    queue_s = waiting_s(n, usual_s + between_s, shared_s, prompt.now, do)
    return Pace(between_s, shared_s, itl_s, more_s, minding, queue_s)


def usual_token_s(n: Value) -> Value:
    """The engine's time for each prompt token, in prompts as long as they usually are there."""
    each_s = n[t.PREFILL_S_PER_TOKEN] + n[t.PREFILL_S_PER_PAIR] * n[t.PAIRS_PER_TOKEN]
    return each_s + n[t.PREFILL_BASE_S] / n[t.STEP_TOKENS]


def waiting_s(n: Value, token_s: Value, step_s: Value, now: float, do: Arithmetic) -> Value:
    """Until a new prompt is begun, at ``token_s`` for each token before it: what its last report told of has gone on
    since then. With no prompt before it, a step of those that decode is half over.
    """
    told_s = (n[t.WAITING_TOKENS] - n[t.SENT_TOKENS]) * token_s
    left_s = do.most(told_s - (now - n[t.HEARD_AT]), 0.0) + n[t.SENT_TOKENS] * token_s
    return do.most(left_s, 0.5 * step_s)


def computing(n: Value, prompt: Prompt, held: Value, reachable: Value, going: Pace, do: Arithmetic) -> Computing:
    """For a worker that holds ``held`` of the prompt's tokens and could have ``reachable`` with what another holds.

    It fetches if that ends sooner.
    """
    own_s, fetched, fetch_s = work_s(n, prompt.tokens - held, held), held - held, 0.0
    if reachable is not held:
        missing = reachable - held
        reading_s = n[t.TRANSFER_BASE_S] + n[t.TRANSFER_S_PER_TOKEN] * missing
        rest_s = work_s(n, prompt.tokens - reachable, reachable)
        worth = (missing > 0) & (reading_s + rest_s < own_s)
        own_s = do.choose(worth, rest_s, own_s)
        fetched = do.choose(worth, missing, 0)
        fetch_s = do.choose(worth, reading_s, 0.0)
    computed = prompt.tokens - held - fetched
    prefill_s = own_s + computed * going.between_s
    return Computing(held, fetched, computed, going.queue_s, fetch_s, prefill_s, own_s * going.minding)


def answering(n: Value, prompt: Prompt, held: Value, going: Pace, do: Arithmetic) -> Answering:
    """For a worker that holds ``held`` tokens already. Where there is no room, others have to end first."""
    missing = prompt.tokens - held
    exposed = do.least(missing, n[t.STEP_TOKENS]) if prompt.streams else missing
    out = prompt.tokens_out
    decode_s = out * going.itl_s
    crowded = n[t.ROOM_TOKENS] < prompt.tokens + out
    return Answering(
        n[t.TRANSFER_BASE_S] + n[t.TRANSFER_S_PER_TOKEN] * exposed,
        going.queue_s,
        do.choose(crowded, decode_s, 0.0),
        decode_s,
        out * do.least(going.itl_s, prompt.itl_target_s),
        going.itl_s,
        n[t.PREFILL_BASE_S] + n[t.PREFILL_S_PER_TOKEN] * TAIL_TOKENS + going.step_s,
        out * going.more_s * going.minding,
    )


class Cost(NamedTuple):
    """What is compared, for each part that a worker may take."""

    prefill_s: Value
    decode_s: Value
    whole_s: Value


def cost(n: Value, one: Computing, two: Answering) -> Cost:
    """The request's own time and what it adds to that of others."""
    prefill_s = one.ttft_s() + one.others_s + n[t.WAY_S]
    answer_s = two.room_s + two.decode_s - two.within_s + two.others_s
    return Cost(prefill_s, two.handoff_s + two.queue_s + two.first_s + n[t.WAY_S] + answer_s, prefill_s + answer_s)


def weigh(n: Value, prompt: Prompt, held: Value, reachable: Value, do: Arithmetic) -> tuple[Computing, Answering, Cost]:
    """All that is predicted of this request there; ``reachable is held`` says that nobody can help."""
    going = pace(n, prompt, do)
    one = computing(n, prompt, held, reachable, going, do)
    two = answering(n, prompt, held, going, do)
    return one, two, cost(n, one, two)
