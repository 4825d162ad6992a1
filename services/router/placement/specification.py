"""What ``native/placement.c`` must equal; runs where there is no compiler.

A request's cost on a worker is a time: its own, plus the time that it adds to other requests, so both have the same
unit and need no weights. Only tokens that must be computed count as work. A decode step costs nothing as long as it is
within the client's target between tokens, or without a target, as long as the batch is uncrowded (``UNCROWDED``).
Prompts that are computed between the steps do not count: how many a worker computed lately says little about the next
seconds, which placement decides itself, and counting them sends requests away from the workers with their cache.

Workers are weighed one after the other here, and many at once in C. Choices are equal, and numbers to 1e-9. A formula
is changed here and in ``placement.c``, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from struct import Struct
from typing import Final, NamedTuple

import numpy as np

from services.router.request.facts import Mode
from services.router.state import fleet_table as t
from services.router.state.block_table import Depths
from services.router.state.worker_view import WorkerView
from shared.contracts.decisions import Part

TAIL_TOKENS: Final = 16
"""Half a block of KV: the prompt's last, partial block is not handed over."""
TOKENS_OUT_UNKNOWN: Final = 256
"""Completion length assumed when the client sets no limit."""
TOKENS_OUT_COUNTED_MAX: Final = 1024
"""Clients set generous limits and seldom reach them: of a higher limit, only this many tokens are counted."""
BUSY_MAX: Final = 0.9
"""The largest share of an engine's time that may go to prompts: near 1 the predicted decode time is infinite."""
UNCROWDED: Final = 5.0
"""Without a target, a decode step costs nothing while it takes at most this many times as long as one of this request
alone on the fastest free worker. Sarathi-Serve (Agrawal et al., OSDI 2024, section 5.1) derives its strict target from
the engine's decode step in the same way, with the same factor.
"""
NEVER_S: Final = 1e9
"""The highest cost, and what is added to the cost of a worker that misses a target."""
LEG_TRANSIT_SHARE: Final = 0.5
"""The part of each leg's transit that delays the first token when both legs run side by side: the request passes in at
the prefill worker, and the token out at the decode worker.
"""
EVICTED_MIN: Final = 64.0
"""What evictions cost is learned from as many at least; of fewer, those that are missing count as free."""
SHORTLISTED: Final = 4
"""Workers of a large fleet that are weighed for each part of the request, in each group."""
SOURCES_MAX: Final = 2
"""Workers that are asked for the same KV: the second for what the first has evicted meanwhile."""
RANKED_MAX: Final = 8
"""Holders of each group that may be asked for KV; those with the longest match are enough."""

MODES: Final = {Mode.AUTO: 0, Mode.AGGREGATED: 1, Mode.DISAGGREGATED: 2, Mode.DECODE_FIRST: 3}
AUTO, AGGREGATED, DISAGGREGATED, DECODE_FIRST = range(4)
STREAMS: Final = 1
"""Option: the decode worker would read the KV while the prompt is computed."""
UNSPLITTABLE: Final = 2
HIT_THRESHOLD: Final = 4
"""Option: the client has set a cache hit threshold."""
MAY_DECODE_FIRST: Final = 8
PREFILL_NAMED: Final = 16
"""Option: the client names the prefill worker, so that no worker serves the request alone."""
SHORT: Final = 32
"""Option: the fleet is large, and only a shortlist of it becomes candidates."""

PREFILL_ROLE: Final = 1
DECODE_ROLE: Final = 2
ALONE_ROLE: Final = 4
"""Role of a worker that may serve the request without a prefill worker, and be compared with a pair."""
ANSWER_ROLE: Final = 8
"""Role of every worker but those that a client excludes by naming another one for its answer."""
BOTH_ROLE: Final = 16
RECEIVER_ROLE: Final = 256
"""Role of a worker that may answer, and to which a prefill worker would hand over some KV. C uses the
numbers between for other things.
"""

ASKED_FOR, ALONE_ASKED_FOR, BEST_FOR_BOTH, ROLE_MISSING, APART, NOTHING_TO_HAND_OVER = range(6)
"""Reasons of a choice."""


class Question(NamedTuple):
    """The numbers of a request that its placement depends on."""

    tokens: int
    tokens_out: int
    """Expected length of the completion."""
    fetch_tokens_min: int
    """Fewer tokens than this are computed, not fetched."""
    now: float
    ttft_target_s: float
    itl_target_s: float
    tie_s: float
    """Costs that differ by less count as equal."""
    decode_first_share_min: float
    """A decode worker is asked to serve a request alone if the router expects it to have this share of the prompt."""
    mode: int
    options: int


Asked = tuple[int, int, int, float, float, float, float, float, int, int]
"""The numbers of a ``Question``. As a plain tuple it is made in a fifth of the time."""


class Estimate(NamedTuple):
    """What a worker would do of a request, in tokens and seconds, and what that costs."""

    roles: int
    group: int
    """Workers of the same group may exchange KV."""
    cached: int
    fetched: int
    computed: int
    queue_s: float
    """The wait until the prompt is begun; also that of the answer, where another worker computes the prompt."""
    fetch_s: float
    prefill_s: float
    prefill_others_s: float
    """Time added to requests that decode there, and to later ones, which compute again what this prompt evicts."""
    handoff_s: float
    """The time of reading the KV, where another worker computes the prompt."""
    kv_wait_s: float
    """The wait until other requests end, where the KV cache has no space before."""
    decode_s: float
    within_s: float
    """The part of ``decode_s`` that costs nothing."""
    itl_s: float
    step_s: float
    """A decode step with this request in the batch: ``itl_s`` without the prompts that are computed in between."""
    first_s: float
    """The step that computes the prompt's tail, and with it the first token that this worker samples."""
    decode_others_s: float
    """Time that the answer adds to requests that decode there."""
    prefill_cost_s: float
    decode_cost_s: float
    whole_cost_s: float
    legs: float
    last_chosen: float
    transit_s: float
    leg_transit_s: float
    """The transit as one leg of a pair: see ``LEG_TRANSIT_SHARE``."""

    def cost_s(self, part: Part) -> float:
        """The cost of a part of the request on this worker."""
        if part is Part.PREFILL:
            return self.prefill_cost_s
        return self.decode_cost_s if part is Part.DECODE else self.whole_cost_s

    def is_late(self, ttft_target_s: float) -> bool:
        """Whether the first token would come after its target."""
        return self.queue_s + self.fetch_s + self.prefill_s > ttft_target_s

    def meets(self, part: Part, ttft_target_s: float, itl_target_s: float) -> bool:
        """Whether the worker would serve a part of the request within the targets."""
        late = part is not Part.DECODE and self.is_late(ttft_target_s)
        return not late and not (part is not Part.PREFILL and self.step_s > itl_target_s)


PACKED: Final = Struct("5q19d")
"""An ``Estimate`` as C has it."""
Choice = tuple[int, int, int, bool, tuple[tuple[int, int], ...], bytes, tuple[WorkerView, ...]]
"""The numbers of the prefill candidate (negative: none) and of the decode candidate, the reason, whether a pair was
possible, the sources of KV as row and last block, and all candidates: their packed estimates, and their views.
"""


def tokens_out_expected(limit: int) -> int:
    """Completion length to count with, for a client's limit in tokens (0: none)."""
    return min(limit or TOKENS_OUT_UNKNOWN, TOKENS_OUT_COUNTED_MAX)


# ---- costs: ``n`` holds the numbers of a worker, as in ``fleet_table``


def work_s(n: Sequence[float], computed: float, cached: float) -> float:
    """The engine's time for ``computed`` prompt tokens after ``cached`` ones."""
    pairs = computed * (cached + 0.5 * computed)
    return n[t.PREFILL_STEP_S] + n[t.PREFILL_TOKEN_S] * computed + n[t.PREFILL_PAIR_S] * pairs


def mean_token_s(n: Sequence[float]) -> float:
    """The engine's time for each prompt token, for prompts of the mean length on that worker."""
    each_s = n[t.PREFILL_TOKEN_S] + n[t.PREFILL_PAIR_S] * n[t.PAIRS_PER_TOKEN]
    return each_s + n[t.PREFILL_STEP_S] / n[t.STEP_TOKENS]


def waiting_s(n: Sequence[float], token_s: float, step_s: float, now: float) -> float:
    """Until a new prompt is begun, at ``token_s`` for each token before it. The engine has worked on the reported
    tokens since its report. With no prompt before it, a new one waits for half a decode step on average.
    """
    reported_s = (n[t.WAITING_TOKENS] - n[t.SENT_TOKENS]) * token_s
    left_s = max(reported_s - (now - n[t.HEARD_AT]), 0.0) + n[t.SENT_TOKENS] * token_s
    return max(left_s, 0.5 * step_s)


def slower_s(n: Sequence[float], question: Question) -> float:
    """The time that the request adds to each step of a batch."""
    return n[t.DECODE_REQUEST_S] + n[t.DECODE_CONTEXT_TOKEN_S] * (question.tokens + question.tokens_out // 2)


def uncrowded_itl_s(decoding: Iterable[Sequence[float]], question: Question) -> float:
    """The decode step that costs nothing to a request without a target; infinite when no free worker decodes."""
    return UNCROWDED * min([inf, *(n[t.DECODE_STEP_S] + slower_s(n, question) for n in decoding)])


def eviction_price(prefilling: Sequence[Sequence[float]]) -> float:
    """What a token costs that another one evicts, in tokens computed again, where these free workers compute prompts.

    As many are computed again as, of all evicted blocks, were lately stored again when no worker had a copy any more.
    While engines are busy, a second of work keeps others waiting for longer: it lengthens a busy period by
    1 / (1 - load) seconds (Kleinrock, "Queueing Systems", volume I, section 5.8).
    """
    evicted = restored = busy = 0.0
    for n in prefilling:
        evicted += n[t.EVICTED_BLOCKS]
        restored += n[t.RESTORED_BLOCKS]
        busy += min(n[t.PROMPTS_PER_S] * mean_token_s(n), BUSY_MAX)
    if not restored > 0.0:
        return 0.0
    return min(1.0, restored / max(evicted, EVICTED_MIN)) / (1.0 - busy / len(prefilling))


class Row(NamedTuple):
    """A worker as the estimate needs it."""

    numbers: Sequence[float]
    roles: int
    group: int
    blocks: int
    """Blocks of the prompt, from its start, that it holds."""
    elsewhere: int
    """Blocks that another worker holds, at most, of whom this one can fetch."""
    in_use: int
    """The part of ``blocks`` that requests hold which run there: a shared block is in the KV cache once."""


def estimate(row: Row, question: Question, price: float, itl_free_s: float) -> Estimate:
    """All predictions for the request on a worker, but ``ALONE_ROLE`` and ``RECEIVER_ROLE``. ``price``: see
    ``eviction_price``;
    ``itl_free_s``: the longest decode step that costs nothing.
    """
    n, tokens, out = row.numbers, question.tokens, question.tokens_out

    token_s, decoding, more_s = mean_token_s(n), n[t.DECODING], slower_s(n, question)
    step_s = n[t.DECODE_STEP_S] + n[t.DECODE_REQUEST_S] * decoding + n[t.DECODE_CONTEXT_TOKEN_S] * n[t.CONTEXT_TOKENS]
    full_step_s, shared_step_s = step_s + more_s, step_s if decoding > 0.0 else 0.0
    # Requests that decode there are disturbed if a part of the step costs something.
    disturbed = decoding * n[t.ANSWERS] if full_step_s > itl_free_s else 0.0
    between_s = shared_step_s / n[t.STEP_TOKENS]
    queue_s = waiting_s(n, token_s + between_s, shared_step_s, question.now)
    itl_s = full_step_s / (1.0 - min(n[t.PROMPTS_PER_S] * token_s, BUSY_MAX))

    # The engine always computes the last token. A worker fetches where that is predicted to end sooner, from the end of
    # what its engine uses on.
    block_size = int(n[t.BLOCK_SIZE])
    usable = max(tokens - 1, 0) // block_size
    found, reach = min(row.blocks, usable) * block_size, min(row.elsewhere, usable) * block_size
    held = max(0, found - int(n[t.DROPPED_TOKENS]))
    own_s, fetched, fetch_s = work_s(n, tokens - held, held), 0, 0.0
    if reach > found and reach - held >= question.fetch_tokens_min:
        reading_s = n[t.TRANSFER_BASE_S] + n[t.TRANSFER_TOKEN_S] * (reach - held)
        rest_s = work_s(n, tokens - reach, reach)
        if reading_s + rest_s < own_s:
            own_s, fetched, fetch_s = rest_s, reach - held, reading_s
    computed = tokens - held - fetched
    prefill_s = own_s + computed * between_s
    # Tokens that it does not hold yet evict as many others, computed or fetched.
    prefill_others_s = own_s * disturbed + price * n[t.PREFILL_TOKEN_S] * (tokens - held)

    exposed = min(tokens - held, n[t.STEP_TOKENS]) if question.options & STREAMS else tokens - held
    handoff_s = n[t.TRANSFER_BASE_S] + n[t.TRANSFER_TOKEN_S] * exposed
    decode_s = out * itl_s
    # Cached blocks that no request uses count as free. Those of the prompt will not be free for its answer.
    shared = min(row.in_use * block_size, held)
    kv_wait_s = decode_s if n[t.FREE_TOKENS] < tokens - shared + out else 0.0
    within_s = decode_s - out * max(full_step_s - itl_free_s, 0.0)
    first_s = n[t.PREFILL_STEP_S] + n[t.PREFILL_TOKEN_S] * TAIL_TOKENS + shared_step_s
    decode_others_s = out * more_s * disturbed

    leg_transit_s = n[t.TRANSIT_S] * (LEG_TRANSIT_SHARE if question.options & STREAMS else 1.0)
    prompt_s = queue_s + fetch_s + prefill_s + prefill_others_s
    answer_s = kv_wait_s + decode_s - within_s + decode_others_s
    prefill_cost_s = prompt_s + leg_transit_s
    decode_cost_s = handoff_s + queue_s + first_s + leg_transit_s + answer_s
    whole_cost_s = prompt_s + n[t.TRANSIT_S] + answer_s
    return Estimate(
        row.roles, row.group, held, fetched, computed, queue_s, fetch_s, prefill_s, prefill_others_s,
        handoff_s, kv_wait_s, decode_s, within_s, itl_s, full_step_s, first_s, decode_others_s,
        bounded(prefill_cost_s), bounded(decode_cost_s), bounded(whole_cost_s),
        n[t.LEGS], n[t.LAST_CHOSEN], n[t.TRANSIT_S], leg_transit_s,
    )  # fmt: skip


def bounded(cost_s: float) -> float:
    """From 0 to ``NEVER_S``, which also stands for what is not a number: so all costs can be compared."""
    return max(cost_s, 0.0) if cost_s < NEVER_S else NEVER_S


# ---- the choice


def shortlist(estimates: Sequence[Estimate], question: Question) -> list[int]:
    """The numbers of the cheapest workers of each group for each part; those that meet the targets come first."""

    def rank_s(number: int, part: Part) -> float:
        one = estimates[number]
        late_s = NEVER_S if part is not Part.DECODE and one.is_late(question.ttft_target_s) else 0.0
        slow_s = NEVER_S if part is not Part.PREFILL and one.step_s > question.itl_target_s else 0.0
        return one.cost_s(part) + late_s + slow_s

    chosen: list[int] = []
    for group in sorted({one.group for one in estimates}):
        listed: dict[int, None] = {}
        for part, role in (
            (Part.PREFILL, PREFILL_ROLE),
            (Part.DECODE, DECODE_ROLE),
            (Part.WHOLE, DECODE_ROLE),
            (Part.WHOLE, ANSWER_ROLE),
        ):
            among = [number for number, one in enumerate(estimates) if one.group == group and one.roles & role]
            ranked = sorted(among, key=lambda number, part=part: rank_s(number, part))  # type: ignore[misc]
            listed.update(dict.fromkeys(ranked[:SHORTLISTED]))
        chosen += listed
    return chosen


class Selection:
    """Selects among the candidates of one request: numbers of estimates."""

    def __init__(self, estimates: Sequence[Estimate], question: Question) -> None:
        self._estimates = estimates
        self._question = question

    def result(self) -> tuple[int, int, int, bool] | None:
        """The cheapest of what the request allows; see the first parts of ``Choice``."""
        mode, options, of = self._question.mode, self._question.options, self._estimates
        if options & UNSPLITTABLE or mode == AGGREGATED:
            return self._any_role(ASKED_FOR, has_pair=False)
        pair = self._cheapest_pair()
        has_pair = pair is not None
        alone = self._having(ALONE_ROLE)
        if mode == DISAGGREGATED:
            alone = [number for number in alone if not of[number].roles & RECEIVER_ROLE]
        whole = self._cheapest(Part.WHOLE, alone)
        if mode == DECODE_FIRST and whole is not None:
            return -1, whole, ALONE_ASKED_FOR, has_pair
        if pair is not None and not self._keep_on_one(pair, whole):
            named = bool(options & PREFILL_NAMED)
            if whole is None or named or self._pair_s(pair) < of[whole].whole_cost_s:
                return *pair, APART, True
        if whole is not None:
            return -1, whole, NOTHING_TO_HAND_OVER if self._lacks_no_block(whole) else BEST_FOR_BOTH, has_pair
        if mode == DISAGGREGATED or options & PREFILL_NAMED:
            return None
        return self._any_role(ROLE_MISSING, has_pair=has_pair)

    def _having(self, role: int) -> list[int]:
        return [number for number, one in enumerate(self._estimates) if one.roles & role]

    def _lacks_no_block(self, whole: int) -> bool:
        """Whether another worker could compute the prompt for this one, but would hand over nothing."""
        of, group = self._estimates, self._estimates[whole].group
        partners = [number for number in self._having(PREFILL_ROLE) if number != whole and of[number].group == group]
        return bool(partners) and not of[whole].roles & RECEIVER_ROLE

    def _keep_on_one(self, pair: tuple[int, int], whole: int | None) -> bool:
        """Two workers of role BOTH would hold the prompt's KV twice, which no predicted time accounts for. Such a pair
        is taken only where a single worker would miss the targets.
        """
        both = self._estimates[pair[0]].roles & self._estimates[pair[1]].roles & BOTH_ROLE
        return bool(both) and self._question.mode == AUTO and whole is not None and self._meets(whole, Part.WHOLE)

    def _meets(self, number: int, part: Part) -> bool:
        return self._estimates[number].meets(part, self._question.ttft_target_s, self._question.itl_target_s)

    def _any_role(self, why: int, *, has_pair: bool) -> tuple[int, int, int, bool] | None:
        """One worker for all of it: a prefill worker, too, where there is no other."""
        chosen = self._cheapest(Part.WHOLE, self._having(DECODE_ROLE) or self._having(ANSWER_ROLE))
        return None if chosen is None else (-1, chosen, why, has_pair)

    def _cheapest(self, part: Part, among: list[int]) -> int | None:
        """The cheapest that meets the targets, or the cheapest if none does; among equals the one with the fewest
        legs, then the one that was chosen longest ago.
        """
        if not among:
            return None
        among = [number for number in among if self._meets(number, part)] or among
        of = self._estimates
        limit_s = min(of[number].cost_s(part) for number in among) + self._question.tie_s
        near = [number for number in among if of[number].cost_s(part) <= limit_s]
        return min(near, key=lambda number: (of[number].legs, of[number].last_chosen))

    def _pair_s(self, pair: tuple[int, int]) -> float:
        return self._estimates[pair[0]].prefill_cost_s + self._estimates[pair[1]].decode_cost_s

    def _cheapest_pair(self) -> tuple[int, int] | None:
        """The cheapest two different workers that may exchange KV, and have some to exchange."""
        best, best_s = None, inf
        prefills, decodes = self._having(PREFILL_ROLE), self._having(RECEIVER_ROLE)
        for group in sorted({self._estimates[number].group for number in prefills}):
            ones = [number for number in prefills if self._estimates[number].group == group]
            others = [number for number in decodes if self._estimates[number].group == group]
            prefill, decode = self._cheapest(Part.PREFILL, ones), self._cheapest(Part.DECODE, others)
            pairs = [(prefill, decode)]
            if prefill == decode:
                pairs = [
                    (prefill, self._cheapest(Part.DECODE, [other for other in others if other != prefill])),
                    (self._cheapest(Part.PREFILL, [one for one in ones if one != decode]), decode),
                ]
            for one, other in pairs:
                if one is not None and other is not None and self._pair_s((one, other)) < best_s:
                    best, best_s = (one, other), self._pair_s((one, other))
        return best


# ---- the fleet


class PythonPlacement:
    """Weighs the workers of a fleet table. ``NativePlacement`` has the same methods."""

    def __init__(self, numbers: t.Floats, flags: t.Bools, sources: t.Bools) -> None:
        """``sources``: written by ``fit``, the rows that may be asked for KV: those that could serve the request, and
        stores.
        """
        self._numbers = numbers
        self._flags = flags
        self._sources = sources
        self._roles: list[int] = []
        self._is_full = False

    def fit(
        self,
        count: int,
        offering: t.Bools,
        allowed: t.Bools | None,
        may_prefill: t.Bools | None,
        may_answer: t.Bools | None,
        heard_min: float,
        /,
    ) -> int:
        """How many of the first ``count`` rows are free, -1 when none could serve the request, full or not. Masks of
        rows: those that offer the model, those that the request does not exclude, and those that the client lets
        compute its prompt and its answer; None: all.
        """
        flags, numbers = self._flags[:, :count], self._numbers[:, :count]
        everyone: t.Bools = np.ones(count, dtype=np.bool_)
        prefill, answer = (everyone if mask is None else mask for mask in (may_prefill, may_answer))
        awake = flags[t.READY] & (numbers[t.HEARD_AT] >= heard_min) & (everyone if allowed is None else allowed)
        fit = awake & flags[t.SERVES] & offering
        free = fit & (numbers[t.LEGS] < numbers[t.LEGS_MAX])
        self._sources[:count] = flags[t.EXCHANGES_KV] & (fit | (awake & ~flags[t.SERVES]))
        roles = PREFILL_ROLE * (flags[t.PREFILLS] & prefill) + DECODE_ROLE * (flags[t.DECODES] & answer)
        roles = roles + ANSWER_ROLE * answer + BOTH_ROLE * (flags[t.PREFILLS] & flags[t.DECODES])
        self._roles = np.where(free, roles, -1).tolist()
        named = [mask for mask in (may_prefill, may_answer) if mask is not None] or [everyone]
        self._is_full = any(bool((fit & ~free & mask).any()) for mask in named)
        return int(free.sum()) if fit.any() else -1

    def choose(
        self,
        asked: Asked,
        groups: t.Ints,
        depths: Depths | None,
        slots: t.Ints | None,
        in_use: Depths | None,
        views: list[WorkerView | None],
        /,
    ) -> Choice | bool | None:
        """Chooses among the rows of the last ``fit``; else says whether a worker that could serve it is full.
        ``groups``: of each row (see ``ClusterView.groups``). ``depths``: how many of the prompt's blocks, from its
        start, each slot of the index holds, and ``slots`` the slot of each row; None: nothing is known of them.
        ``in_use``: how many of each row requests hold that run there. Returns None if that must be known, because a
        worker that holds a part of the prompt has too little free KV for all of it.
        """
        question = Question(*asked)
        free = [row for row, roles in enumerate(self._roles) if roles >= 0]
        numbers: list[list[float]] = self._numbers[:, : len(self._roles)].T.tolist()
        decoding = [numbers[row] for row in free if self._flags[t.DECODES, row]]
        price = eviction_price([numbers[row] for row in free if self._flags[t.PREFILLS, row]])
        itl_free_s = question.itl_target_s
        if not itl_free_s < inf:
            itl_free_s = uncrowded_itl_s(decoding, question)
        blocks = self._blocks(depths, slots)
        room = question.tokens + question.tokens_out
        if in_use is None and any(blocks[row] > 0 and numbers[row][t.FREE_TOKENS] < room for row in free):
            return None
        ranked = self._ranked(question, groups, blocks)

        def row_of(row: int) -> Row:
            group = int(groups[row])
            reachable = ranked[group][0][0] if group in ranked and self._flags[t.EXCHANGES_KV, row] else 0
            used = 0 if in_use is None else int(in_use[row])
            return Row(numbers[row], self._roles[row], group, blocks[row], reachable, used)

        rows = [row for row in free if self._roles[row] & (PREFILL_ROLE | ANSWER_ROLE)]
        estimates = [estimate(row_of(row), question, price, itl_free_s) for row in rows]
        if question.options & SHORT:
            listed = shortlist(estimates, question)
            rows, estimates = [rows[number] for number in listed], [estimates[number] for number in listed]
        estimates = [
            one._replace(roles=one.roles | self._more_roles(one, row, question))
            for row, one in zip(rows, estimates, strict=True)
        ]
        chosen = Selection(estimates, question).result()
        if chosen is None:
            return self._is_full
        computing = chosen[0] if chosen[0] >= 0 else chosen[1]
        sources = self._sources_of(estimates[computing], rows[computing], question, ranked)
        packed = b"".join(PACKED.pack(*one) for one in estimates)
        return *chosen, sources, packed, tuple(view for row in rows if (view := views[row]) is not None)

    def _more_roles(self, one: Estimate, row: int, question: Question) -> int:
        if not one.roles & DECODE_ROLE:
            return 0
        if not self._is_receiver(one, row, question):
            return ALONE_ROLE
        return RECEIVER_ROLE + ALONE_ROLE * self._may_serve_alone(one, row, question)

    def _is_receiver(self, one: Estimate, row: int, question: Question) -> bool:
        """Whether some KV could be handed over to the worker. Baton's connector moves what lies before the prompt's
        last full block, or boundary, others move all. After a refusal, what the index says of a cache does not count.
        """
        held = one.cached if question.options & MAY_DECODE_FIRST else 0
        lacks_block = question.tokens - held >= self._numbers[t.HANDED_OVER_MIN, row]
        return bool(lacks_block or not self._flags[t.EXCHANGES_KV, row])

    def _may_serve_alone(self, one: Estimate, row: int, question: Question) -> bool:
        """Workers of role BOTH may serve the request without a prefill worker, and so may decode workers that have most
        of the prompt.
        """
        if question.options & PREFILL_NAMED:
            return False
        if self._flags[t.ATTACHED, row]:
            return question.mode != DECODE_FIRST
        if question.mode != DECODE_FIRST:
            if one.roles & BOTH_ROLE:
                return True
            if question.options & HIT_THRESHOLD:
                return False
        most = one.cached + one.fetched >= question.decode_first_share_min * question.tokens
        may = bool(question.options & MAY_DECODE_FIRST and self._flags[t.EXCHANGES_KV, row])
        return may and most and bool(one.computed <= self._numbers[t.STEP_TOKENS, row])

    def _blocks(self, depths: Depths | None, slots: t.Ints | None) -> list[int]:
        """The prompt's blocks on each row."""
        if depths is None or slots is None:
            return [0] * len(self._roles)
        found = [*slots.tolist(), *[-1] * len(self._roles)][: len(self._roles)]
        depth_of = depths.tolist()
        return [depth_of[slot] if 0 <= slot < len(depth_of) else 0 for slot in found]

    def _ranked(self, question: Question, groups: t.Ints, blocks: list[int]) -> dict[int, list[tuple[int, int]]]:
        """The workers of each group that may be asked for KV, as blocks and row, those with the most first."""
        ranked: dict[int, list[tuple[int, int]]] = {}
        if question.options & UNSPLITTABLE:
            return ranked
        for row in sorted(range(len(blocks)), key=lambda row: -blocks[row]):
            of = ranked.setdefault(int(groups[row]), [])
            held = blocks[row] * self._numbers[t.BLOCK_SIZE, row]
            if self._sources[row] and held >= question.fetch_tokens_min and len(of) < RANKED_MAX:
                of.append((blocks[row], row))
        return {group: of for group, of in ranked.items() if of}

    def _sources_of(
        self, one: Estimate, row: int, question: Question, ranked: dict[int, list[tuple[int, int]]]
    ) -> tuple[tuple[int, int], ...]:
        """The rows to ask for what the worker fetches, with the block to stop before."""
        if not one.fetched:
            return ()
        block_size = int(self._numbers[t.BLOCK_SIZE, row])
        first, last = one.cached // block_size, (one.cached + one.fetched) // block_size
        sources: list[tuple[int, int]] = []
        for blocks, holder in ranked[one.group]:
            end = min(blocks, last)
            if len(sources) == SOURCES_MAX or (end - first) * block_size < question.fetch_tokens_min:
                break
            if holder != row:
                sources.append((holder, end))
        return tuple(sources)
