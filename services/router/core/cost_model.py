"""How long would it take on each of these workers? Predicted seconds, for all of them at once, from what was learned.

Only tokens that have to be computed count as work. A worker's time is everybody's: beside its own time, a request
costs what it adds to that of others, and so nothing needs a weight.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from services.router.core import fleet_table as t

TOKENS_OUT_UNKNOWN = 256
"""Completion length assumed when the client sets no limit."""
TOKENS_OUT_COUNTED_MAX = 1024
"""Limits are set generously and seldom reached: more than this is not believed."""
BUSY_MAX = 0.9
"""No worker is believed to spend more of its time on prompts: its decodes would never end."""


class Prompt(NamedTuple):
    """A request in numbers."""

    tokens: int
    tokens_out: int
    """Of the completion, as far as a limit is believed."""


class Rows(NamedTuple):
    """The workers that are weighed: ``numbers`` and ``flags`` of the fleet's table, one column for each of ``rows``."""

    rows: t.Ints
    numbers: t.Floats
    flags: t.Bools
    groups: t.Ints


class Computing(NamedTuple):
    """What it takes to have the prompt's KV on each worker. Tokens and seconds, one of each for each worker."""

    cached: t.Ints
    fetched: t.Ints
    computed: t.Ints
    queue_s: t.Floats
    fetch_s: t.Floats
    prefill_s: t.Floats
    others_s: t.Floats

    def ttft_s(self) -> t.Floats:
        """Until the prompt is computed, and with it the first token."""
        return self.queue_s + self.fetch_s + self.prefill_s


class Answering(NamedTuple):
    """What it takes to make the completion on each worker."""

    handoff_s: t.Floats
    queue_s: t.Floats
    decode_s: t.Floats
    itl_s: t.Floats
    others_s: t.Floats


def tokens_out_believed(asked: int) -> int:
    """Completion length to count with, for a limit of ``asked`` tokens (0: none)."""
    return min(asked or TOKENS_OUT_UNKNOWN, TOKENS_OUT_COUNTED_MAX)


def step_s(numbers: t.Floats, joining: int = 0, context_tokens: int = 0) -> t.Floats:
    """One decode step of the batch as it is, with so many more requests and tokens in it."""
    seconds: t.Floats = (
        numbers[t.DECODE_BASE_S]
        + numbers[t.DECODE_S_PER_REQUEST] * (numbers[t.DECODING] + joining)
        + numbers[t.DECODE_S_PER_CONTEXT_TOKEN] * (numbers[t.CONTEXT_TOKENS] + context_tokens)
    )
    return seconds


def work_s(numbers: t.Floats, computed: t.Ints, cached: t.Ints) -> t.Floats:
    """The engine's time for a prompt, of which some is cached or comes from elsewhere."""
    pairs = computed * (cached + 0.5 * computed)
    seconds: t.Floats = numbers[t.PREFILL_BASE_S] + numbers[t.PREFILL_S_PER_TOKEN] * computed
    seconds += numbers[t.PREFILL_S_PER_PAIR] * pairs
    return seconds


def computing(on: Rows, prompt: Prompt, held: t.Ints, reachable: t.Ints, arrivals_per_s: float) -> Computing:
    """For workers that hold ``held`` of the prompt's tokens and could have ``reachable`` with what others hold.

    Fetching happens where it ends sooner. ``arrivals_per_s``: requests that will come to each of them.
    """
    n = on.numbers
    between = np.where(n[t.DECODING] > 0, step_s(n), 0.0) / np.maximum(n[t.STEP_TOKENS], 1.0)
    queue_s = n[t.WAITING_TOKENS] * (n[t.PREFILL_S_PER_TOKEN] + between)
    alone = prompt.tokens - held
    prefill_s = work_s(n, alone, held)
    cached, fetched, fetch_s = held, np.zeros_like(held), np.zeros_like(prefill_s)
    if reachable is not held:
        missing = reachable - held
        left = prompt.tokens - reachable
        reading_s = n[t.TRANSFER_BASE_S] + n[t.TRANSFER_S_PER_TOKEN] * missing
        computing_s = work_s(n, left, reachable)
        worth = (missing > 0) & (reading_s + computing_s < prefill_s)
        fetched = np.where(worth, missing, 0)
        fetch_s = np.where(worth, reading_s, 0.0)
        prefill_s = np.where(worth, computing_s, prefill_s)
    computed = prompt.tokens - cached - fetched
    others_s = prefill_s * (np.where(on.flags[t.DECODES], n[t.DECODING], 0.0) + arrivals_per_s * (queue_s + prefill_s))
    return Computing(cached, fetched, computed, queue_s, fetch_s, prefill_s + computed * between, others_s)


def answering(on: Rows, prompt: Prompt, held: t.Ints, *, streamed: bool) -> Answering:
    """For decode workers that hold ``held`` tokens already and read the rest of the prompt's KV."""
    n = on.numbers
    missing = prompt.tokens - held
    exposed = np.minimum(missing, n[t.STEP_TOKENS]) if streamed else missing
    handoff_s = n[t.TRANSFER_BASE_S] + n[t.TRANSFER_S_PER_TOKEN] * exposed
    queue_s = n[t.WAITING_TOKENS] * n[t.PREFILL_S_PER_TOKEN]
    itl_s, decode_s = decoding(on, prompt)
    return Answering(handoff_s, queue_s, decode_s, itl_s, joining_s(on, prompt))


def decoding(on: Rows, prompt: Prompt) -> tuple[t.Floats, t.Floats]:
    """Seconds between tokens in the batch that it joins, and for all of them. No room: others have to end first."""
    n = on.numbers
    busy = np.minimum(n[t.BUSY], BUSY_MAX)
    itl_s = step_s(n, 1, prompt.tokens + prompt.tokens_out // 2) / (1.0 - busy)
    decode_s = prompt.tokens_out * itl_s
    crowded = n[t.ROOM_TOKENS] < prompt.tokens + prompt.tokens_out
    return itl_s, np.where(crowded, 2.0 * decode_s, decode_s)


def joining_s(on: Rows, prompt: Prompt) -> t.Floats:
    """By how much its tokens delay those of the others in the batch."""
    n = on.numbers
    slower_s = n[t.DECODE_S_PER_REQUEST] + n[t.DECODE_S_PER_CONTEXT_TOKEN] * (prompt.tokens + prompt.tokens_out // 2)
    seconds: t.Floats = prompt.tokens_out * slower_s * n[t.DECODING]
    return seconds
