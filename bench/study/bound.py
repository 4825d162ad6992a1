"""An upper bound on goodput: no schedule on this fleet, even one that knows the future, serves more within the targets.

``upper_bound`` solves the dual of a relaxation of the replay. The relaxation:

1. All workers form one engine of their summed speed, which may split, pause and move work at no cost (a fluid). Decode
   work needs the share of it that is not on prefill workers.
2. Caches are infinite, shared, and read in no time: a block's KV is computed at most once by a prefill, between the
   first arrival of a request that contains it and the last instant at which one of them must have its first token. A
   block that some answer contains costs no prefill.
3. A step that takes ``f(prefill tokens, pairs, sequences, context)`` seconds charges each of its tokens a part, and the
   parts add up to at most the step (``Charges``). A request is good only if its own tokens are charged between its
   arrival and its deadlines. Which requests run is known in advance, with their output lengths.
4. A request whose own uncached tokens take longer than the target on the fastest worker alone is never good.

Every schedule of the real fleet is feasible here with the same good requests, so the relaxation's optimum is a bound.
It is an integer program: choose requests x and blocks y, where x needs its blocks, and per time bin the charged seconds
must fit. Its Lagrangian dual prices the seconds of each bin with some p >= 0:

    optimum <= sum over bins (p * capacity) + max over (x, y) of (value of x - priced work of x and y)

for *every* p (weak duality), where work pays the lowest price of the bins in which it may run: bins that are partly
allowed count as allowed. The maximum is exact and cheap, because blocks form a forest: a block pays off if the requests
and blocks below it together do (a closure). A subgradient search looks for prices that make the sum small; the bound
holds however good or bad it is. Times on the network are zero.

In a closed loop arrival times depend on the schedule. There is one bin, from the first arrival to the deadlines after
the last, as early as both can be. A schedule that takes k times as long has k times the seconds for the same requests,
so no rate is larger than that of the shortest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf
from types import MappingProxyType

import numpy as np

from bench.study.results import Slo
from replay.profile import Profile
from replay.split import Split
from replay.traces import Request, chains
from services.worker.engines.simulated.core import step_models as table
from services.worker.engines.simulated.core.step_models import NOISE_BEYOND
from shared.contracts.workers import Role

BINS_PER_TARGET = 2
"""Bins in the time of a target to the first token: more make the bound tighter and slower to find."""
BINS_MAX = 4000
ROUNDS = 120
"""Of the search for prices."""
COMPUTE_SHARES = (1.0, 0.75, 0.5)
"""Of compute in a step that takes the longer of compute and memory."""
TABLE_SLOPES_US = (0.2, 0.5)
"""For a token and layer: about the table's slopes below and above 512 tokens, to fit decoding and prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charges:
    """Seconds that a step is charged for what it computes: never more than the step takes, whatever it contains, on a
    worker of speed 1.
    """

    token_s: float
    """For each prompt token."""
    pair_s: float
    """For each earlier token that a prompt token attends to."""
    sequence_s: float
    """For each token that is decoded."""
    context_s: float
    """For each token of its context."""
    resident_s: float
    """For each token of KV that the decoding sequence shares with no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinearModel:
    """A step takes at least the sum of these, so charges may split the first two among what shares them."""

    decode_s: float
    """If anything decodes."""
    prefill_s: float
    """If any prompt token is computed."""
    token_s: float
    pair_s: float
    sequence_s: float
    context_s: float


def charges_of(profile: Profile) -> list[Charges]:
    """Ways to charge the steps of an engine; each gives a bound.

    What any prompt token makes a step take is shared by at most ``max_num_batched_tokens`` of them, and what any
    decoding makes it take by at most ``max_num_seqs`` sequences, or, the other way, by the tokens that the KV cache
    holds.
    """
    kv_tokens = profile.kv_blocks * profile.block_tokens
    noise = exp(-profile.noise * (NOISE_BEYOND + profile.noise / 2)) if profile.noise else 1.0
    found = []
    for model in _linear_models(profile):
        for by_sequence, by_resident in ((1 / profile.max_num_seqs, 0.0), (0.0, 1 / kv_tokens)):
            found.append(
                Charges(
                    token_s=noise * (model.token_s + model.prefill_s / profile.max_num_batched_tokens),
                    pair_s=noise * model.pair_s,
                    sequence_s=noise * (model.sequence_s + model.decode_s * by_sequence),
                    context_s=noise * model.context_s,
                    resident_s=noise * model.decode_s * by_resident,
                )
            )
    return found


def _linear_models(profile: Profile) -> list[_LinearModel]:
    rate = profile.prefill_tokens_per_s
    token_s, pair_s = 1 / rate if rate else 0.0, profile.prefill_s_per_pair
    if profile.step_model == "table":
        return _table_models()
    if profile.step_model == "roofline":
        # The longer of two is at least any mean of them.
        return [
            _LinearModel(
                decode_s=(1 - compute) * profile.decode_base_s,
                prefill_s=profile.prefill_base_s,
                token_s=compute * token_s,
                pair_s=compute * pair_s,
                sequence_s=profile.decode_per_sequence_s + compute * token_s,
                context_s=(1 - compute) * profile.decode_per_context_token_s,
            )
            for compute in COMPUTE_SHARES
        ]
    return [
        _LinearModel(
            decode_s=max(0.0, profile.decode_base_s - profile.decode_per_sequence_s),
            prefill_s=profile.prefill_base_s,
            token_s=token_s,
            pair_s=pair_s,
            sequence_s=min(profile.decode_base_s, profile.decode_per_sequence_s),
            context_s=profile.decode_per_context_token_s,
        )
    ]


def _table_models() -> list[_LinearModel]:
    """Lines below the table, which is piecewise linear: below its knots, and no steeper than where it goes on."""
    layer_s = table.LAYERS * 1e-6
    fixed_s = table.HOST_S + min(table.VOCABULARY_US) * 1e-6
    products = [
        (tokens, us + table.OTHER_KERNELS_US * tokens)
        for tokens, us in zip(table.TOKENS, table.PRODUCTS_US, strict=True)
    ]
    pair_us = min(
        _slope(table.PAIRS, table.PROMPT_US),
        *(us / pairs for pairs, us in zip(table.PAIRS, table.PROMPT_US, strict=True)),
    )
    context_us = min(
        min(
            *(us / (batch * each) for each, us in zip(table.CONTEXTS, row, strict=False)),
            _slope(table.CONTEXTS, row) / batch,
        )
        for batch, row in zip(table.BATCHES, table.DECODE_US, strict=True)
    )
    models = []
    for slope in TABLE_SLOPES_US:
        base_us = min(us - slope * tokens for tokens, us in products)
        for to_decode in (1.0, 0.0):
            base_s = fixed_s + layer_s * base_us
            models.append(
                _LinearModel(
                    decode_s=to_decode * base_s,
                    prefill_s=(1 - to_decode) * base_s,
                    token_s=layer_s * slope,
                    pair_s=layer_s * pair_us,
                    sequence_s=layer_s * slope,
                    context_s=layer_s * context_us,
                )
            )
    return models


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of a table's last piece, with which it goes on."""
    return (ys[-1] - ys[len(ys) - 2]) / (xs[len(ys) - 1] - xs[len(ys) - 2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Nothing serves more within both targets."""

    requests: float
    tokens: float
    """Of prompts and completions."""
    requests_per_s: float
    tokens_per_s: float


def upper_bound(
    requests: Sequence[Request],
    split: Split,
    profile: Profile,
    slo: Slo,
    *,
    slow: Mapping[int, float] = MappingProxyType({}),
    rounds: int = ROUNDS,
) -> Bound:
    """Of requests at their load (see ``at_load``). ``slow``: speeds of some workers by number, as the world takes them.
    Takes some seconds for ten thousand requests.
    """
    speeds = [profile.speed * slow.get(number, 1.0) for number in range(len(split.roles()))]
    arrivals = earliest_arrivals(requests)
    span_s = max(max(arrivals) - min(arrivals), 1e-9)
    tokens = np.array([float(request.tokens) for request in requests])
    works = [_Work(requests, arrivals, charges, profile, slo, max(speeds)) for charges in charges_of(profile)]
    can_be_good = np.all([work.can_be_good for work in works], axis=0)
    best = [
        min(_Dual(work, split, speeds, values * can_be_good, slo).lowest(rounds) for work in works)
        for values in (np.ones(len(requests)), tokens)
    ]
    return Bound(requests=best[0], tokens=best[1], requests_per_s=best[0] / span_s, tokens_per_s=best[1] / span_s)


def feasible_share(requests: Sequence[Request], profile: Profile, slo: Slo) -> float:
    """Share of the requests that an idle worker could serve within the targets, with what others share in its cache."""
    arrivals = earliest_arrivals(requests)
    works = [_Work(requests, arrivals, charges, profile, slo, profile.speed) for charges in charges_of(profile)]
    return float(np.all([work.can_be_good for work in works], axis=0).mean())


def earliest_arrivals(requests: Sequence[Request]) -> list[float]:
    """Open loop: when they arrive. Closed loop: when they would if answers took no time."""
    arrivals, last = [], dict[int, float]()
    for request in requests:
        at_s = request.at_s
        if request.gap_s is not None and request.session in last:
            at_s = last[request.session] + request.gap_s
        if request.gap_s is not None:
            last[request.session] = at_s
        arrivals.append(at_s)
    return arrivals


@dataclass(slots=True)
class _Block:
    """A block of the trace. Sessions are those of closed loops; any other request counts as a session of its own."""

    parent: _Block | None
    tokens_before: int
    first_at: float
    last_at: float
    session: int
    """The first."""
    first: int
    """First request."""
    others_at: float = inf
    """First arrival in another session than the first."""
    count: int = 0
    is_answer: bool = False
    node: int = -1


class _Work:
    """What the good requests cost at the least, and when it may be spent."""

    def __init__(
        self,
        requests: Sequence[Request],
        arrivals: list[float],
        charges: Charges,
        profile: Profile,
        slo: Slo,
        fastest: float,
    ) -> None:
        self.charges = charges
        self._fastest = fastest
        self.size = profile.block_tokens
        self.is_open = all(request.gap_s is None for request in requests)
        self._slo = slo
        blocks = self._read(requests, arrivals)
        count = len(requests)
        self.arrives, self.leaf = np.array(arrivals), np.full(count, -1)
        self.decoded_by = self.arrives + slo.ttft_s + slo.itl_s * np.array([one.output_tokens - 1 for one in requests])
        self.prefill_s, self.decode_s = np.zeros(count), np.zeros(count)
        self.can_be_good = np.ones(count, dtype=bool)
        self.parents: list[int] = []
        """Of nodes: runs of blocks that exactly the same requests contain. A parent comes before its children."""
        self._node_s: list[float] = []
        self._spans: list[tuple[float, float]] = []
        for number, (request, chain) in enumerate(zip(requests, blocks, strict=True)):
            self._add(number, request, chain)
        self.node_s, self.spans = np.array(self._node_s), np.array(self._spans).reshape(-1, 2)

    def _read(self, requests: Sequence[Request], arrivals: list[float]) -> list[list[_Block]]:
        """Of each prompt, its full blocks. The chained names make a forest of them."""
        known: dict[int, _Block] = {}
        names = chains(requests)
        for number in sorted(range(len(requests)), key=arrivals.__getitem__):
            request, at_s = requests[number], arrivals[number]
            session = -1 - number if request.gap_s is None else request.session
            parent = None
            for index, name in enumerate(names[number]):
                block = known.get(name)
                if block is None:
                    block = known[name] = _Block(parent, index * self.size, at_s, at_s, session, number)
                block.last_at = at_s
                if session != block.session:
                    block.others_at = min(block.others_at, at_s)
                block.count += 1
                block.is_answer |= index >= len(request.blocks)
                parent = block
        return [
            [known[name] for name in names[number][: len(request.blocks)]] for number, request in enumerate(requests)
        ]

    def _add(self, number: int, request: Request, chain: list[_Block]) -> None:
        own = next((index for index, block in enumerate(chain) if block.count == 1), len(chain))
        for block in chain[:own]:
            if block.node < 0:
                self._place(block)
        self.leaf[number] = chain[own - 1].node if own else -1
        self.prefill_s[number] = self._prefill_s(own * self.size, request.input_tokens)
        unshared = sum(self._is_unshared(block, request) for block in chain) * self.size
        unshared += request.input_tokens - len(chain) * self.size
        steps = request.output_tokens - 1
        grown = steps * (steps + 1) / 2
        if request.answer and request.gap_s is None:
            grown = 0.0  # While it runs, a later request may have blocks of its answer.
        charges = self.charges
        self.decode_s[number] = (
            charges.sequence_s * steps
            + charges.context_s * steps * (request.input_tokens + (steps + 1) / 2)
            + charges.resident_s * (steps * unshared + grown)
        )
        self.can_be_good[number] = self._alone_in_time(number, request, chain)

    def _place(self, block: _Block) -> None:
        parent = block.parent
        if parent is not None and parent.count == block.count:
            block.node = parent.node
        else:
            block.node = len(self.parents)
            self.parents.append(-1 if parent is None else parent.node)
            self._node_s.append(0.0)
            self._spans.append((block.first_at, block.last_at + self._slo.ttft_s))
        if not block.is_answer:
            self._node_s[block.node] += self._block_s(block)

    def _alone_in_time(self, number: int, request: Request, chain: list[_Block]) -> bool:
        """Whether the fastest worker would serve it in time alone, with what others may compute before in its cache."""
        computed = [block for block in chain if self._computes(block, request, number)]
        ttft_s = sum(map(self._block_s, computed)) + self._prefill_s(len(chain) * self.size, request.input_tokens)
        return ttft_s <= self._slo.ttft_s * self._fastest

    def _computes(self, block: _Block, request: Request, number: int) -> bool:
        """Whether this request itself has to compute the block, for its first token to be in time."""
        if block.is_answer or block.first != number:
            return False
        if request.gap_s is not None:
            return block.others_at == inf
        return bool(block.others_at > self.arrives[number] + self._slo.ttft_s)

    def _is_unshared(self, block: _Block, request: Request) -> bool:
        """Whether no sequence that runs at the same time can hold the block."""
        return block.count == 1 if request.gap_s is None else block.others_at == inf

    def _block_s(self, block: _Block) -> float:
        return self._prefill_s(block.tokens_before, block.tokens_before + self.size)

    def _prefill_s(self, begin: int, end: int) -> float:
        """For the prompt tokens of these positions."""
        return self.charges.token_s * (end - begin) + self.charges.pair_s * (end * end - begin * begin) / 2


class _Windows:
    """For intervals of bins, where the price is lowest."""

    def __init__(self, first: np.ndarray, last: np.ndarray) -> None:
        last = np.maximum(first, last)
        self._level = np.frexp((last - first + 1).astype(float))[1] - 1
        self._first = first
        self._second = last - (1 << self._level) + 1

    def cheapest(self, table: list[np.ndarray], prices: np.ndarray) -> np.ndarray:
        """Bin numbers. ``table``: by level k, for each bin the cheapest of the 2 ** k from there on."""
        found = np.empty(len(self._first), dtype=np.int64)
        for level in np.unique(self._level):
            here = self._level == level
            one, other = table[level][self._first[here]], table[level][self._second[here]]
            found[here] = np.where(prices[one] <= prices[other], one, other)
        return found


def _cheapest(prices: np.ndarray) -> list[np.ndarray]:
    table = [np.arange(len(prices))]
    width = 1
    while 2 * width <= len(prices):
        one, other = table[-1][: len(prices) - 2 * width + 1], table[-1][width : len(prices) - width + 1]
        table.append(np.where(prices[one] <= prices[other], one, other))
        width *= 2
    return table


class _Dual:
    """The Lagrangian dual of one way to charge, for one value per request."""

    def __init__(self, work: _Work, split: Split, speeds: Sequence[float], values: np.ndarray, slo: Slo) -> None:
        self._work = work
        self._values = values
        begins, after_s = float(work.arrives.min()), work.decoded_by - work.arrives
        ends = float(work.decoded_by.max()) if work.is_open else float(work.arrives.max() + after_s.max())
        bin_s = max(slo.ttft_s / BINS_PER_TARGET, (ends - begins) / BINS_MAX) if work.is_open else ends - begins
        bins = self._bins = max(1, ceil((ends - begins) / bin_s))

        def begun(instants: np.ndarray) -> np.ndarray:
            return np.minimum(((instants - begins) / bin_s).astype(np.int64), bins - 1)

        def ended(instants: np.ndarray) -> np.ndarray:
            return np.minimum(np.ceil((instants - begins) / bin_s).astype(np.int64), bins) - 1

        first = begun(work.arrives)
        prefilled = ended(work.arrives + slo.ttft_s)
        self._scarce_until = (int(first.max()) + 1, int(prefilled.max()) + 1, bins)
        self._prefills = _Windows(first, prefilled)
        self._decodes = _Windows(first, ended(work.decoded_by))
        self._nodes = _Windows(begun(work.spans[:, 0]), ended(work.spans[:, 1]))
        decoding = [speed for speed, role in zip(speeds, split.roles(), strict=True) if role is not Role.PREFILL]
        self._capacity_s = np.array([[sum(speeds) * bin_s], [sum(decoding) * bin_s]])
        """Seconds of one bin: of all workers, and of those that decode."""
        self._apart = split.prefill > 0

    def lowest(self, rounds: int) -> float:
        """The smallest value that the search finds; each is a bound."""
        work = self._work
        total_s = float(work.prefill_s.sum() + work.decode_s.sum() + work.node_s.sum())
        most = 4.0 * float(self._values.sum()) / max(total_s, 1e-9)
        flats = [self._flat(until, row) for until in self._scarce_until for row in range(1 + self._apart)]
        levels = np.geomspace(most / 300, most, 8)
        starts = [(self._at(flat * price)[0], price, which) for which, flat in enumerate(flats) for price in levels]
        best, level, which = min([(self._at(flats[0] * 0.0)[0], 0.0, 0), *starts])
        flat, factor = flats[which], 1.4
        while level and factor > 1.02:
            near, price = min((self._at(flat * price)[0], price) for price in (level * factor, level / factor))
            best, level, factor = (near, price, factor) if near < best else (best, level, factor**0.5)
        return self._descend(flat * level, best, rounds if level else 0)

    def _flat(self, until: int, row: int) -> np.ndarray:
        """A price of one up to a bin: when nothing arrives any more, time is not scarce."""
        prices = np.zeros((2, self._bins))
        prices[row, :until] = 1.0
        return prices

    def _descend(self, prices: np.ndarray, best: float, rounds: int) -> float:
        """Polyak's steps towards a value a little below the best one."""
        ambition = 0.02
        for _round in range(rounds):
            value, slope = self._at(prices)
            ambition *= 1.0 if value < best * (1 - 1e-4) else 0.93
            best = min(best, value)
            slope[1] *= self._apart
            norm = float((slope * slope).sum())
            if norm == 0.0:
                break
            prices = np.maximum(0.0, prices - (value - best * (1 - ambition)) / norm * slope)
        return best

    def _at(self, prices: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and a subgradient. ``prices``: of any second in a bin, and of one that decodes on top of it."""
        work = self._work
        anywhere, decoding = prices[0], prices[0] + prices[1]
        table = _cheapest(anywhere)
        prefill_at, node_at = self._prefills.cheapest(table, anywhere), self._nodes.cheapest(table, anywhere)
        decode_at = self._decodes.cheapest(_cheapest(decoding), decoding)
        gains = self._values - work.prefill_s * anywhere[prefill_at] - work.decode_s * decoding[decode_at]
        gains = np.where(self._values > 0.0, np.maximum(gains, 0.0), 0.0)
        costs = work.node_s * anywhere[node_at]
        taken, held = self._closure(gains, costs)
        taken &= gains > 0.0
        used = np.zeros_like(prices)
        np.add.at(used[0], prefill_at[taken], work.prefill_s[taken])
        np.add.at(used[0], decode_at[taken], work.decode_s[taken])
        np.add.at(used[0], node_at[held], work.node_s[held])
        np.add.at(used[1], decode_at[taken], work.decode_s[taken])
        profit = float(gains[taken].sum()) - float(costs[held].sum())
        return float((self._capacity_s * prices).sum()) + profit, self._capacity_s - used

    def _closure(self, gains: np.ndarray, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Requests and nodes of the largest profit: a request needs its node, a node the one before it."""
        work = self._work
        profits = -costs
        has_leaf = work.leaf >= 0
        np.add.at(profits, work.leaf[has_leaf], gains[has_leaf])
        sums, parents = profits.tolist(), work.parents
        for node in range(len(sums) - 1, -1, -1):
            if sums[node] > 0.0 and parents[node] >= 0:
                sums[parents[node]] += sums[node]
        held = [False] * len(sums)
        for node, parent in enumerate(parents):
            held[node] = sums[node] > 0.0 and (parent < 0 or held[parent])
        holding = np.array(held, dtype=bool)
        taken = np.ones(len(gains), dtype=bool)
        taken[has_leaf] = holding[work.leaf[has_leaf]]
        return taken, holding
