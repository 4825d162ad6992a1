"""The reader: what each request of an engine fetches before it is computed.

The engine calls ``matched`` until it returns a number, allocates blocks and reports them (``allocated``). ``settle``
returns, step by step, the requests whose fetch has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from connector.groups import Blocks, GroupPlan
from connector.messages import PeerKey, ReadPart
from connector.reader.fetch import Fetch, FetchLimits, FetchPlan, Outbox, Shortcuts
from connector.reader.lease_request import Source
from connector.reader.peers import Peers
from connector.reader.prefetched_blocks import WithoutRequest
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import (
    FirstToken,
    KvGrant,
    KvOffer,
    KvRead,
    KvSource,
    KvTransferReport,
    LegOrder,
    ReleaseKv,
)


@dataclass(slots=True)
class TokenCounts:
    """Where the tokens of one request came from. A preempted request is admitted, and counted, again.

    ``local`` and ``fetched`` are of the current admission.
    """

    local: int = 0
    fetched: int = 0
    prompt: int = 0
    first_local: int = 0
    first_fetched: int = 0
    recomputed: int = 0
    refetched: int = 0
    reprefilled: int = 0
    preemptions: int = 0
    admitted: bool = False
    """The current admission is past fetching: its tokens are counted."""
    refused: bool = False
    hit_share: float = 0.0
    prefill_cached_tokens: int = -1
    first_token_received: bool = False
    """The engine has the answer's first token as the last one of its prompt."""
    slowed_s: float = 0.0
    reads: list[KvRead] = field(default_factory=list)

    def preempted(self, preemptions: int) -> None:
        """Begin the next admission."""
        self.preemptions = preemptions
        self.admitted = False
        self.local = self.fetched = 0

    def admit(self, tokens: int) -> None:
        """Count ``tokens``, all that precede the next one: those neither local nor fetched are computed.

        The last token is always computed, even if its KV is cached, because its logits are needed. A received first
        token is the last one then, and not counted.
        """
        if self.admitted:
            return
        self.admitted = True
        self.fetched = max(0, min(self.fetched, tokens - 1 - self.local))
        computed = tokens - self.local - self.fetched
        if self.preemptions and self.prompt:
            self.refetched += self.fetched
            self.reprefilled += computed
        else:
            received = int(self.first_token_received)
            self.prompt, self.first_local, self.first_fetched, self.recomputed = (
                tokens - received,
                self.local,
                self.fetched,
                computed - received,
            )

    def begin(self, tokens: int) -> None:
        """The answer to a prompt of so many tokens begins with a received token. The counts are what is planned, until
        the blocks are there.
        """
        self.first_token_received = True
        self.prompt, self.first_local, self.first_fetched = tokens, self.local, self.fetched
        self.recomputed = tokens - self.local - self.fetched

    def transfer_report(self, offer: KvOffer | None) -> KvTransferReport:
        return KvTransferReport(
            prompt_tokens=self.prompt,
            local_tokens=self.first_local,
            fetched_tokens=self.first_fetched,
            recomputed_tokens=self.recomputed,
            refetched_tokens=self.refetched,
            reprefilled_tokens=self.reprefilled,
            preemptions=self.preemptions,
            refused=self.refused,
            hit_share=self.hit_share,
            prefill_cached_tokens=self.prefill_cached_tokens,
            first_token_received=self.first_token_received,
            recompute_slowed_s=self.slowed_s,
            reads=self.reads,
            offer=offer,
        )


FETCHES_MAX = 3
"""Fetches per admission of a request; after that, missing blocks are computed. A further fetch begins when one left
blocks missing, or when the locally cached prefix changed while the request waited.
"""


class EngineRequest(Protocol):
    """The part of an engine's request that the reader uses."""

    request_id: str
    num_preemptions: int

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Full hashes of all full blocks."""


@dataclass(slots=True)
class RequestState:
    """One request as the reader sees it."""

    order: LegOrder
    request_id: str = ""
    counts: TokenCounts = field(default_factory=TokenCounts)
    fetch: Fetch | None = None
    loading: bool = False
    """The engine has allocated blocks and waits."""
    fetches: int = 0
    """Number of fetches in this admission."""
    aborted: bool = False
    has_used_offer: bool = False
    """A fetch releases the offer's lease."""
    common: int | None = None
    """Tokens that all groups have cached; None: as many as the engine tells."""
    goal_max: int | None = None
    """The furthest position to ask for: a boundary that a holder has and which full attention is cached beyond, so that
    the next fetch uses less of that cache; or, after a preemption, the position beyond which no holder has anything. A
    request that waits for memory loses what it had cached, and asks again when less than that is left.
    """
    first_token: FirstToken | None = None
    """First token of the prefill leg, until the engine may take it."""


@dataclass(slots=True)
class Settled:
    """Requests whose fetch has ended."""

    ended: set[str] = field(default_factory=set)
    """All of them."""
    empty: set[int] = field(default_factory=set)
    """Blocks that hold nothing, where what came before them is of use."""
    failed: dict[str, int] = field(default_factory=dict)
    """Requests that can use none of their blocks, and how far full attention arrived nevertheless."""

    def add(self, other: Settled) -> None:
        """Join both."""
        self.ended |= other.ended
        self.empty |= other.empty
        self.failed |= other.failed

    @property
    def lacks_any(self) -> bool:
        """Whether something did not arrive."""
        return bool(self.empty or self.failed)


@dataclass(frozen=True, slots=True)
class Scope:
    """What a fetch of an admission can ask for."""

    goal: int
    """Position up to which it can bring KV."""
    sources: list[Source]
    take: KvOffer | None


class Reader:
    def __init__(
        self,
        reader: PeerKey,
        groups: GroupPlan,
        peers: Peers,
        limits: FetchLimits,
        now: Callable[[], float],
        shortcuts: Shortcuts | None = None,
        without_request: WithoutRequest | None = None,
    ) -> None:
        self.outbox = Outbox()
        self.refused: list[str] = []
        """Requests to refuse, because too little is cached."""
        self.admitted: set[str] = set()
        """Admitted requests whose transfer report is not sent yet."""
        self.first_tokens: dict[str, FirstToken] = {}
        """First tokens, by id of requests that wait for their blocks, for the engine to take. It may begin the answer
        before the last block is there: what does not arrive is computed."""
        self.unknown_peers: set[PeerKey] = set()
        """Sources that are not connected."""
        self.numbers = count(1)
        self._key = reader
        self.groups = groups
        self._peers = peers
        self._limits = limits
        self._without_request = without_request or WithoutRequest()
        self._shortcuts = shortcuts or Shortcuts()
        self._now = now
        self.fetching: dict[str, RequestState] = {}
        """Requests with a fetch, by id: most have none, and every step looks at these."""
        self.unfinished: list[Fetch] = []
        """Abandoned fetches whose reads are not over."""
        self._requests: dict[str, RequestState] = {}
        self._by_goal: dict[bytes, Fetch] = {}
        """Attached fetches by the last hash of their prompt, which names all of it."""

    def goal(self, request: EngineRequest, order: LegOrder, local_tokens: int) -> int:
        """Position up to which this admission may fetch KV; 0: it does not. ``local_tokens`` are cached in all groups;
        full attention that is cached beyond them is of use up to less than the goal. Call before ``matched``.
        """
        state = self._state_of(request, order)
        state.common = local_tokens
        if state.fetch is not None:
            return state.fetch.end
        scope = self._scope(state, request, local_tokens)
        return scope.goal if scope is not None else 0

    def matched(self, request: EngineRequest, order: LegOrder, local_tokens: int) -> int | None:
        """Tokens after ``local_tokens`` that can be fetched. None: not known yet, or another request fetches the same
        KV, or the request is in ``refused``.

        vLLM calls this in every step while ``num_computed_tokens`` is 0, so also after each preemption.
        """
        state = self._state_of(request, order)
        counts = state.counts
        common, state.common = local_tokens if state.common is None else state.common, None
        if (prefetched := self._without_request.blocks).unused:
            prefetched.found(request.block_hashes, local_tokens // self.groups.unit)
        if self._is_coming(state, request.block_hashes, local_tokens):
            return None
        fetch = self._fetch(state, request, local_tokens, common)
        tokens = 0
        if fetch is not None:
            fetch.on_time(self._now())
            promised = fetch.tokens()
            if promised is None:
                return None
            tokens = promised
            if not tokens and fetch.behind > common and fetch.behind != state.goal_max:
                state.goal_max = fetch.behind
                self._drop(state)
                return None
            if not tokens and counts.preemptions and fetch.finds_nothing:
                state.goal_max = common
                state.fetches -= 1
        if local_tokens + tokens <= common:
            local_tokens, tokens = common, 0
        counts.local = local_tokens
        counts.fetched = 0
        hit_share = (local_tokens + tokens) / max(1, request.num_tokens)
        if request.num_tokens and hit_share < state.order.cache_hit_threshold:
            counts.refused, counts.hit_share = True, hit_share
            self._drop(state)
            self.refused.append(request.request_id)
            return None
        if not tokens:
            self._drop(state)
        return tokens

    def allocated(
        self,
        request: EngineRequest,
        block_ids: Sequence[Sequence[int]],
        fetched_tokens: int,
        fresh: Sequence[Container[int]] = (),
    ) -> None:
        """The engine has allocated blocks: for the tokens to fetch, or, with none, for those to compute.

        ``block_ids``: the request's blocks by group, from the prompt's start on. ``fresh``: those that were not cached,
        by group; a model whose only group has full attention needs none.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if not fetched_tokens:
            self._drop(state)
            self._decline(state)
            if not state.counts.admitted:
                state.counts.admit(request.num_tokens)
                self.admitted.add(request.request_id)
        elif state.fetch is not None:
            start = state.fetch.plan.start
            state.loading = True
            state.counts.fetched = fetched_tokens
            state.fetch.begin(self._local(block_ids, start, start + fetched_tokens, fresh), self._now())
            self._show_first_token(state)

    def finished(self, request_id: str, offer: KvOffer | None, order: LegOrder) -> KvTransferReport | None:
        """The request has ended in any way. None if there is nothing to report."""
        state = self._requests.get(request_id)
        self._decline(state or RequestState(order))
        if state is None:
            return KvTransferReport(offer=offer) if offer is not None else None
        transfer_report = state.counts.transfer_report(offer)
        self.admitted.discard(request_id)
        self.first_tokens.pop(request_id, None)
        if state.loading and state.fetch is not None:
            state.aborted = True  # vLLM keeps its blocks until ``settle`` returns it, when no read can write into them.
            state.fetch.stop()
        else:
            self._drop(state)
            del self._requests[request_id]
        return transfer_report

    def transfer_report(self, request_id: str) -> KvTransferReport:
        state = self._requests.get(request_id)
        return state.counts.transfer_report(None) if state is not None else KvTransferReport()

    def restart(self, request_id: str) -> None:
        """The request's blocks get other names: what was asked for under the old ones is not needed."""
        state = self._requests.get(request_id)
        if state is not None and not state.loading:
            self._drop(state)
            state.first_token = None

    def take_first_tokens(self) -> dict[str, FirstToken]:
        """``first_tokens``, once."""
        taken, self.first_tokens = self.first_tokens, {}
        return taken

    def began(self, request_id: str, prompt_tokens: int) -> None:
        """The engine has sent the first token of the answer to a prompt of so many tokens."""
        self._requests[request_id].counts.begin(prompt_tokens)

    def slowed(self, request_id: str, seconds: float) -> None:
        """What did not arrive was computed beside ready requests, and so took longer: bounded for so many seconds."""
        if (state := self._requests.get(request_id)) is not None:
            state.counts.slowed_s += seconds

    def cached_tokens(self, request_id: str) -> int:
        """Tokens that the request did not have to compute when it was first admitted."""
        state = self._requests.get(request_id)
        return state.counts.first_local + state.counts.first_fetched if state is not None else 0

    def settle(self) -> Settled:
        """What has ended since the last call."""
        settled = Settled()
        for state in list(self.fetching.values()):
            fetch = state.fetch
            if not state.loading or fetch is None or not fetch.over:
                continue
            settled.ended.add(state.request_id)
            if state.aborted:
                self._drop(state)
                del self._requests[state.request_id]
                continue
            state.counts.fetched = fetch.arrived
            if self.groups.keeps_prefix:
                settled.empty.update(fetch.missing())
            elif not fetch.arrived:
                settled.failed[state.request_id] = fetch.full_end
            state.loading = False
            self._drop(state)
        if self.unfinished:
            self.unfinished = [fetch for fetch in self.unfinished if not fetch.over]
        return settled

    def arrived_so_far(self) -> tuple[str, int] | None:
        """The request that alone has a fetch and waits for the rest of it, and the position up to which full attention
        arrived.

        None if others have a fetch too: blocks that enter the prefix cache shorten what those miss, and each time they
        would plan again.
        """
        if len(self.fetching) != 1:
            return None
        (state,) = self.fetching.values()
        fetch = state.fetch
        if not state.loading or state.aborted or fetch is None or fetch.full_end == fetch.plan.start:
            return None
        return state.request_id, fetch.full_end

    def on_time(self) -> None:
        """Called in every step."""
        now = self._now()
        for fetch in self._fetches():
            fetch.on_time(now)

    def on_grant(self, grant: KvGrant) -> None:
        """Hand a grant to its fetch. A grant without one needs no action: its lease has been released."""
        for state in self.fetching.values():
            if state.fetch is not None and state.fetch.has_request(grant.ask_id):
                is_taken = state.fetch.on_grant(grant, self._now())
                if is_taken and grant.final and any(source.follow for source in state.order.sources):
                    # What was granted before its prompt was computed was cached, and so was what precedes it.
                    end = state.fetch.granted_end(grant.ask_id) if grant.prefill_cached_tokens < 0 else 0
                    state.counts.prefill_cached_tokens = max(grant.prefill_cached_tokens, end)
                    state.first_token = grant.first_token
                    self._show_first_token(state)
                return

    def on_part(self, part: ReadPart) -> bool:
        """Whether the read belongs to a request."""
        for fetch in self._fetches():
            if fetch.is_reading(part.read_id):
                fetch.on_part(part, self._now())
                return True
        return False

    def on_peer(self) -> None:
        """A peer was connected."""
        for fetch in self._fetches():
            fetch.on_peer(self._now())

    def on_peer_gone(self, key: PeerKey) -> None:
        """The worker with this epoch is gone."""
        for fetch in self._fetches():
            fetch.on_peer_gone(key, self._now())

    @property
    def idle(self) -> bool:
        """Nothing is requested or being read."""
        return not self.unfinished and not self.fetching

    @property
    def listens(self) -> bool:
        """Whether grants may come as notices."""
        return not self.idle and any(fetch.listens for fetch in self._fetches())

    @property
    def reads_under_way(self) -> int:
        return 0 if self.idle else sum(fetch.reads_under_way for fetch in self._fetches())

    @property
    def has_only_wanted_reads(self) -> bool:
        """No read of an ended request is under way."""
        return not self.unfinished and not any(state.aborted for state in self.fetching.values())

    def plan(
        self, hashes: Sequence[bytes], start: int, common: int, goal: int, sources: list[Source], order: LegOrder
    ) -> FetchPlan:
        """A plan for the KV from ``start`` to ``goal``, in tokens of a prompt with these hashes. See ``FetchPlan``."""
        self.unknown_peers.update(source.peer for source in sources if self._peers.clock_ahead_s(source.peer) is None)
        return FetchPlan(
            reader=self._key,
            groups=self.groups,
            hashes=hashes,
            start=start,
            common=common,
            goal=goal,
            sources=sources,
            follow_s=order.wait_s_max,
            limits=self._limits,
            outbox=self.outbox,
            clock_ahead=self._peers.clock_ahead_s,
            shortcuts=self._shortcuts,
            next_number=lambda: next(self.numbers),
        )

    def is_fetching(self, hashes: Sequence[bytes]) -> bool:
        """Whether a request fetches of a prompt with these hashes, or of one that begins or continues like it."""
        for fetch in self._by_goal.values():
            common = min(len(hashes), len(fetch.plan.hashes))
            if common and not fetch.stopped and fetch.plan.hashes[common - 1] == hashes[common - 1]:
                return True
        return False

    def sources(self, named: Sequence[KvSource], tokens: int, *, may_follow: bool = False) -> list[Source]:
        """The sources of a prompt of so many tokens."""
        size = self.groups.stride
        return [
            Source(
                peer=(source.worker_id, source.epoch),
                first=source.first * size,
                end=min(source.boundary or source.end * size or tokens, tokens),
                follow=source.follow and may_follow,
                leg_id=source.leg_id,
                worth_s=source.worth_s,
            )
            for source in named
        ]

    def _state_of(self, request: EngineRequest, order: LegOrder) -> RequestState:
        """The request's state, at its present admission."""
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = RequestState(order, request.request_id)
        if request.num_preemptions != state.counts.preemptions:
            state.counts.preempted(request.num_preemptions)
            state.fetches, state.goal_max = 0, None
        return state

    def _local(
        self, block_ids: Sequence[Sequence[int]], start: int, end: int, fresh: Sequence[Container[int]]
    ) -> list[Blocks]:
        """Where to read the KV from ``start`` to ``end``. Of a window, the first blocks may be cached."""
        local = []
        for number, table in enumerate(block_ids):
            needed = self.groups.needed(number, start, end)
            ids = list(table[needed.start : needed.stop])
            if number not in self.groups.full:
                ids = [block_id for block_id in ids if block_id in fresh[number]]
            local.append(Blocks(number, needed.stop - len(ids), ids))
        return local

    def _is_coming(self, state: RequestState, hashes: Sequence[bytes], start: int) -> bool:
        """Whether another request fetches all that this one would fetch from ``start`` on, or a fetch without a request
        the next part of it: it will be cached.
        """
        if not hashes or not (state.order.sources or state.order.take):
            return False
        others = self._without_request.under_way
        if others and state.fetch is None and any(each.brings(hashes, start) for each in others):
            return True
        other = self._by_goal.get(hashes[-1])
        return other is not None and other is not state.fetch and other.plan.start <= start and not other.stopped

    def _scope(self, state: RequestState, request: EngineRequest, local_tokens: int) -> Scope | None:
        """What a fetch may ask for at the present admission; None: nothing. A source is followed, and an offer taken,
        at the first admission only: later the prompt is computed.
        """
        order, groups, hashes = state.order, self.groups, request.block_hashes
        first = state.fetches == 0 and not state.counts.preemptions
        tokens = len(hashes) * groups.unit
        goal = tokens if groups.keeps_prefix else groups.last_boundary(request.num_tokens)
        named = self.sources(order.sources, tokens, may_follow=first)
        sources = [source for source in named if not self._peers.is_shunned(source.peer)]
        take = order.take if first and order.take and not self._peers.is_shunned(_holder(order.take)) else None
        if not groups.keeps_prefix:
            goal = groups.cut(min(goal, self._reach(state, hashes, sources, take)))
        elif state.goal_max is not None:
            goal = min(goal, state.goal_max)
        if state.fetches >= FETCHES_MAX or local_tokens >= goal or not (sources or take):
            return None
        handed_over = take is not None or (first and any(source.follow for source in sources))
        if not handed_over and goal - local_tokens < order.fetch_min_tokens:
            return None
        return Scope(goal, sources, take)

    def _reach(self, state: RequestState, hashes: Sequence[bytes], sources: list[Source], take: KvOffer | None) -> int:
        """The furthest boundary that a holder may have."""
        if take is not None and self.groups.is_named(hashes, take.boundary, take.last_hash):
            return take.boundary
        reach = max((source.end for source in sources), default=0)
        return reach if state.goal_max is None else min(reach, state.goal_max)

    def _fetch(self, state: RequestState, request: EngineRequest, start: int, common: int) -> Fetch | None:
        """The fetch of this admission. One under way is kept if it still begins where the cached part ends."""
        if state.fetch is not None:
            if state.fetch.plan.start == start:
                return state.fetch
            state.fetches -= state.counts.preemptions > 0 and not state.fetch.begun  # it waits for memory
            self._drop(state)
        scope = self._scope(state, request, common)
        if scope is None or start >= scope.goal:
            return None
        hashes, take = list(request.block_hashes), scope.take
        state.fetches += 1
        plan = self.plan(hashes, start, common, scope.goal, scope.sources, state.order)
        if take is not None:
            plan.take = take
            state.first_token = take.first_token
            if self._peers.clock_ahead_s(_holder(take)) is None:
                self.unknown_peers.add(_holder(take))
        state.fetch = self._by_goal[hashes[-1]] = Fetch(plan, self._now())
        self.fetching[state.request_id] = state
        state.has_used_offer = state.has_used_offer or any(request.is_offer for request in state.fetch.requests)
        return state.fetch

    def _show_first_token(self, state: RequestState) -> None:
        if state.first_token is not None and state.loading and not state.aborted and not state.counts.preemptions:
            self.first_tokens[state.request_id], state.first_token = state.first_token, None

    def _decline(self, state: RequestState) -> None:
        """Release an unused offer, instead of letting it expire."""
        offer = state.order.take
        if offer is None or state.has_used_offer:
            return
        state.has_used_offer = True
        reader, lease_ids = WorkerId(self._key[0]), [offer.lease_id]
        self.outbox.releases.append(
            ReleaseKv(worker_id=offer.worker_id, epoch=offer.epoch, reader_id=reader, lease_ids=lease_ids)
        )

    def _drop(self, state: RequestState) -> None:
        """Detach the fetch from its request: it has ended or is not needed."""
        fetch, state.fetch = state.fetch, None
        if fetch is None:
            return
        del self.fetching[state.request_id]
        if self._by_goal.get(fetch.plan.hashes[-1]) is fetch:
            del self._by_goal[fetch.plan.hashes[-1]]
        fetch.stop()
        state.counts.reads.extend(fetch.reads())
        if not fetch.over:
            self.unfinished.append(fetch)

    def _fetches(self) -> list[Fetch]:
        waiting = [state.fetch for state in self.fetching.values() if state.fetch is not None]
        return [*waiting, *self.unfinished]


def _holder(offer: KvOffer) -> PeerKey:
    return offer.worker_id, offer.epoch
