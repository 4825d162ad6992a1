"""Fetch a prompt's KV from other workers: request leases, read granted blocks, try other sources for the rest.

fetch = Fetch(plan, now)            lease requests go out at once
fetch.tokens()                      None while grants are awaited; then the number of tokens to allocate blocks for
fetch.begin(local_blocks, now)      blocks are allocated: reads begin
fetch.on_grant / on_part / on_time  events
fetch.over                          nothing is requested, read or leased any more; ``missing()`` did not arrive

Lease requests, releases, reads and cancellations are appended to the plan's ``Outbox``.

If the model has one group with full attention, each prefix is of use and several sources may each supply a part.
Otherwise the tokens up to one boundary are fetched, or none: one source at a time is asked for all that is missing, so
that no late write of a source that failed meets a later read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from connector.groups import Blocks, GroupPlan
from connector.messages import PeerKey, Read, ReadPart
from connector.reader.lease_request import LeaseRequest, Segment, Source
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    LEASE_BLOCKS_MAX,
    KvGrant,
    KvOffer,
    KvRead,
    LeaseKv,
    NoGrant,
    ReleaseKv,
    is_sound_grant,
    is_sound_offer,
    new_lease_id,
    pack_full_hashes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Seconds."""

    answer_s_max: float = 0.5
    """Time limit for a holder to reply. Without a reply the blocks are requested elsewhere or computed."""
    load_s_max: float = 4.0
    """Time that a store may load the blocks for, at most."""
    peer_s_max: float = 3.0
    """Time limit for a source to become connected."""
    hold_s: float = 10.0
    """Requested duration of a lease."""
    margin_s: float = 0.25
    """A read must end this long before its lease: clocks drift between handshakes."""


@dataclass(slots=True)
class Outbox:
    """What the caller is to send and do. The caller empties the lists."""

    lease_requests: list[LeaseKv] = field(default_factory=list)
    releases: list[ReleaseKv] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    part_blocks: list[int] = field(default_factory=lambda: [1])
    """``Read.part_blocks`` of this engine's reads by KV cache group; known with its memory."""


@dataclass(frozen=True, slots=True)
class Shortcuts:
    """Ways past the bus that grants may take to this reader."""

    reply_to: str = ""
    """See ``LeaseKv.reply_to``."""
    listens: Callable[[PeerKey], bool] = lambda _peer: False
    """See ``LeaseKv.listens``."""


@dataclass(slots=True, kw_only=True)
class FetchPlan:
    """What to fetch, from which sources, for which reader. Positions are in tokens from the start of the prompt."""

    reader: PeerKey
    groups: GroupPlan
    hashes: Sequence[bytes]
    """Full hashes of the prompt, from the first on."""
    start: int
    """Full attention is here up to this position."""
    common: int
    """All groups are here up to this position."""
    goal: int
    """The last position up to which KV is of use."""
    sources: list[Source]
    take: KvOffer | None = None
    follow_s: float = 30.0
    """Maximum wait for the next blocks of a followed source."""
    limits: FetchLimits
    outbox: Outbox
    clock_ahead: Callable[[PeerKey], float | None]
    """The most that a peer's clock may be ahead of this one, seconds; None if it is not connected."""
    shortcuts: Shortcuts
    next_number: Callable[[], int]
    """Numbers unique among all fetches of this reader."""


def first_hash(plan: FetchPlan, have: int) -> int:
    """Index of the first hash of a lease request. Where full attention goes beyond the other groups, a holder's longest
    boundary may lie between: then its hashes are sent, too, if all are not too many.
    """
    groups = plan.groups
    if groups.keeps_prefix:
        return groups.hashes_from(have)
    first = groups.hashes_from(min(have, plan.common))
    count = (plan.goal + groups.beyond) // groups.unit - first
    return first if count <= LEASE_BLOCKS_MAX else groups.hashes_from(have)


def lease_message(plan: FetchPlan, request: LeaseRequest) -> LeaseKv:
    groups, first = plan.groups, first_hash(plan, request.first)
    return LeaseKv(
        worker_id=WorkerId(request.peer[0]),
        epoch=Epoch(request.peer[1]),
        reader_id=WorkerId(plan.reader[0]),
        ask_id=request.lease_id,
        hashes=pack_full_hashes(plan.hashes[first : (request.end + groups.beyond) // groups.unit]),
        first=first,
        have=request.first,
        hold_s=plan.limits.hold_s,
        follow_s=plan.follow_s if request.followed else 0.0,
        leg_id=request.leg_id,
        reply_to=plan.shortcuts.reply_to,
        listens=request.listens,
        end=request.end if groups.beyond else 0,
        load_s=request.load_s,
    )


def release_message(plan: FetchPlan, request: LeaseRequest) -> ReleaseKv:
    ids = {"lease_ids": [request.lease_id]} if request.is_offer else {"ask_ids": [request.lease_id]}
    return ReleaseKv(
        worker_id=WorkerId(request.peer[0]), epoch=Epoch(request.peer[1]), reader_id=WorkerId(plan.reader[0]), **ids
    )


MISSING, GRANTED, ARRIVED = 0, 1, 2
"""States of a block: not leased; leased, perhaps being read; arrived."""
WHOLE = -1
"""Instead of a block's index in ``Fetch._spent``: the source was asked for all that was missing."""

MISMATCH = "the grant does not match the request"
NOT_BEYOND = "the holder's last boundary is not beyond the full attention that is cached here"
ANOTHER_END = "the holder ended at an earlier boundary than the one that blocks are allocated for"


class BlockProgress:
    """A run of blocks of one group, one byte each: every event searches it, and a long prompt has thousands."""

    def __init__(self, run: range) -> None:
        self.start = run.start
        self._states = bytearray(len(run))

    @property
    def end(self) -> int:
        """Index after the last block."""
        return self.start + len(self._states)

    @property
    def arrived(self) -> int:
        """Index after the longest prefix that arrived."""
        return self.end - len(self._states.lstrip(bytes([ARRIVED])))

    @property
    def promised(self) -> int:
        """Index after the longest prefix that arrived or is leased."""
        return self.next_missing(self.start)

    def cut(self, count: int) -> None:
        """Reduce the run to its first ``count`` blocks."""
        del self._states[count:]

    def mark(self, first: int, count: int, state: int) -> None:
        """Set the state of ``count`` blocks from ``first`` on; blocks outside the run are ignored."""
        begin, end = max(0, first - self.start), min(len(self._states), first - self.start + count)
        if begin < end:
            self._states[begin:end] = bytes([state]) * (end - begin)

    def next_missing(self, index: int) -> int:
        """The first missing block from ``index`` on; ``end`` if there is none."""
        found = self._states.find(MISSING, max(0, index - self.start))
        return self.end if found < 0 else self.start + found

    def missing_until(self, index: int, end: int) -> int:
        """End of the run of missing blocks that begins at ``index``, at most ``end``."""
        run = self._states[index - self.start : end - self.start]
        return index + len(run) - len(run.lstrip(bytes([MISSING])))

    def missing_runs(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """(first, end) of each run of missing blocks from ``first`` to ``end``."""
        end = min(end, self.end)
        index = self.next_missing(first)
        while index < end:
            stop = self.missing_until(index, end)
            yield index, stop
            index = self.next_missing(stop)

    def not_arrived(self) -> list[int]:
        """Offsets from ``start`` of the blocks that did not arrive."""
        return [place for place, state in enumerate(self._states) if state != ARRIVED]


class Fetch:
    """See the module. Times are on the reader's clock unless they say otherwise."""

    def __init__(self, plan: FetchPlan, now: float) -> None:
        self.plan = plan
        self.requests: list[LeaseRequest] = []
        self.stopped = False
        self.end = plan.goal
        """Position up to which KV is to come: the goal, until a holder grants an earlier boundary."""
        self.behind = 0
        """A boundary that a holder has, but which does not go beyond ``FetchPlan.start``; 0: none."""
        self._groups = groups = plan.groups
        self._progress = [
            BlockProgress(groups.needed(number, plan.start, plan.goal)) for number in range(len(groups.groups))
        ]
        self._lead = groups.full[0] if groups.full else 0
        """The group whose blocks are counted as tokens."""
        self._spent: set[tuple[PeerKey, int]] = set()
        self._local: list[Blocks] | None = None
        self._reads: dict[int, tuple[LeaseRequest, int, int, int]] = {}
        """Reads under way, by id: lease request, group, index of the first block, blocks that are not final."""
        self._peers_due_at = now + plan.limits.peer_s_max
        if plan.take is not None:
            self._take(plan.take, now)
        self._request_missing(now)

    def tokens(self) -> int | None:
        """Tokens from ``FetchPlan.start`` on to allocate blocks for; None while it is not known.

        A followed prompt is still being computed, so blocks for all of it are allocated at once and arrive one by one.
        """
        if any(request.open and request.followed for request in self.requests):
            return self.end - self.plan.start
        if any(request.open for request in self.requests):
            return None
        if self._groups.keeps_prefix:
            return self._progress[0].promised * self._groups.stride - self.plan.start
        return 0 if self._misses_any else self.end - self.plan.start

    @property
    def over(self) -> bool:
        """Nothing is requested or being read any more, and no byte moves."""
        return not any(request.busy for request in self.requests)

    @property
    def finds_nothing(self) -> bool:
        """All that were asked have said that they hold nothing that is missing."""
        return bool(self.requests) and all(request.read().failure == NoGrant.NOT_HELD for request in self.requests)

    @property
    def begun(self) -> bool:
        """Whether blocks to read into are allocated."""
        return self._local is not None

    @property
    def arrived(self) -> int:
        """Tokens from ``FetchPlan.start`` on with which the request can continue."""
        if self._groups.keeps_prefix:
            return self.full_end - self.plan.start
        return self.end - self.plan.start if all(run.arrived == run.end for run in self._progress) else 0

    @property
    def full_end(self) -> int:
        """Position up to which full attention arrived, at the end of a block in each of its groups."""
        sizes = (
            (self._progress[number].arrived, self._groups.groups[number].block_size) for number in self._groups.full
        )
        end = min((arrived * size for arrived, size in sizes), default=self.plan.start)
        return max(self.plan.start, min(end, self.end) // self._groups.stride * self._groups.stride)

    @property
    def reads_under_way(self) -> int:
        return len(self._reads)

    @property
    def listens(self) -> bool:
        """Whether grants may come as notices."""
        return any(request.open and request.listens for request in self.requests)

    def has_request(self, lease_id: str) -> bool:
        return any(request.lease_id == lease_id for request in self.requests)

    def granted_end(self, lease_id: str) -> int:
        """Position up to which this request was granted full attention; 0: none was."""
        return next((request.granted_end for request in self.requests if request.lease_id == lease_id), 0)

    def is_reading(self, read_id: int) -> bool:
        return read_id in self._reads

    def missing(self) -> list[int]:
        """Allocated local blocks whose content did not arrive, of the one group with full attention."""
        local = self._local[0].ids if self._local is not None else []
        return [local[place] for place in self._progress[0].not_arrived() if place < len(local)]

    def reads(self) -> list[KvRead]:
        """Report of each source."""
        return [request.read() for request in self.requests]

    def begin(self, local: list[Blocks], now: float) -> None:
        """Read into these blocks, one entry for each group; what begins after them is not needed any more. Blocks of a
        window that are missing at the beginning of an entry are here already.
        """
        self._local = local
        for blocks, run in zip(local, self._progress, strict=True):
            run.mark(run.start, blocks.first - run.start, ARRIVED)
            run.cut(blocks.end - run.start)
        if self._groups.keeps_prefix:
            self.end = min(self.end, self.plan.start + len(local[0].ids) * self._groups.stride)
        self._read_granted(now)

    def on_grant(self, grant: KvGrant, now: float) -> bool:
        """A holder's reply; returns whether it is taken. A grant that does not fit the request, or names other content,
        ends the request. One that came before, the other way, or ahead of its predecessor, is ignored: the bus brings
        each in its turn.
        """
        request = next((request for request in self.requests if request.lease_id == grant.ask_id), None)
        if request is None or not request.open or request.peer != (grant.worker_id, grant.epoch):
            return False
        if grant.number >= 0:
            if grant.number != request.numbered:
                return False
            request.numbered += 1
        if grant.groups and (why := self._accept(request, grant, now)):
            request.close(why)
        if grant.final:
            request.close(str(grant.reason or ""))
        elif not request.followed:  # It is loading them.
            answer_s = self.plan.limits.answer_s_max
            request.overdue_at = min(now, request.requested_at + request.load_s) + answer_s
        self._go_on(now)
        return True

    def on_part(self, part: ReadPart, now: float) -> None:
        """Blocks of a read are final."""
        request, group, first, left = self._reads.pop(part.read_id)
        begin, run = first + part.first, self._progress[group]
        request.reading -= part.count
        if left > part.count:
            self._reads[part.read_id] = (request, group, first, left - part.count)
        if part.failure:
            request.totals.fail(part.failure)
            run.mark(begin, part.count, MISSING)
            self._spent.update((request.peer, index) for index in range(begin, begin + part.count))
        else:
            if group == self._lead:
                size = self._groups.groups[group].block_size
                beyond = max(begin * size, self.plan.start)
                request.totals.tokens += min((begin + part.count) * size, self.end) - beyond
            request.totals.moved(part.started_s, part.ended_s, part.bytes)
            run.mark(begin, part.count, ARRIVED)
        self._go_on(now)

    def on_peer(self, now: float) -> None:
        """A peer was connected, perhaps a source of this fetch."""
        self._read_granted(now)

    def on_peer_gone(self, peer: PeerKey, now: float) -> None:
        """The worker with this epoch is gone."""
        for request in self.requests:
            if request.peer == peer:
                self._drop(request, "the worker is gone")
                request.released = True
        self._go_on(now)

    def on_time(self, now: float) -> None:
        """Give up what is overdue. Called in every step."""
        for request in self.requests:
            if request.open and now >= request.overdue_at:
                late = NoGrant.FOLLOW_OVER if request.followed else NoGrant.UNREACHABLE
                request.close(str(late))
            if request.segments and now >= self._peers_due_at and self.plan.clock_ahead(request.peer) is None:
                self._drop(request, "not connected")
        self._go_on(now)

    def stop(self) -> None:
        """Give the fetch up. It is ``over`` when no read can write into its blocks any more."""
        self.stopped = True
        for request in self.requests:
            request.open = False
            request.segments.clear()
            self._release(request)
        self.plan.outbox.cancel.extend(self._reads)

    @property
    def _misses_any(self) -> bool:
        return any(run.promised < run.end for run in self._progress)

    def _go_on(self, now: float) -> None:
        if self.stopped:
            return
        self._read_granted(now)
        self._request_missing(now)
        for request in self.requests:
            if not request.busy:
                self._release(request)

    def _take(self, offer: KvOffer, now: float) -> None:
        """Use an offer if its last hash shows that it is of this prompt. Otherwise (an edited history, for example) the
        KV is requested by hashes.
        """
        plan, groups = self.plan, self._groups
        if not is_sound_offer(offer) or not groups.is_named(plan.hashes, offer.boundary, offer.last_hash):
            return
        granted = groups.granted(offer.groups, 0, offer.boundary)
        if granted is None or (offer.boundary > plan.goal and not groups.keeps_prefix):
            return
        end = min(offer.boundary, plan.goal)
        request = LeaseRequest(
            lease_id=offer.lease_id,
            peer=(offer.worker_id, offer.epoch),
            first=plan.start,
            end=end,
            requested_at=now,
            overdue_at=now,
            is_offer=True,
            open=False,
        )
        self.requests.append(request)
        if self._can_end_at(end):
            request.granted(Segment(self._wanted(granted[0]), offer.until_s), end, now)
        else:
            self._release(request)

    def _accept(self, request: LeaseRequest, grant: KvGrant, now: float) -> str:
        """Take what a grant has; or why not, if it is of no use or not what was asked for."""
        groups, have = self._groups, max(request.granted_end, request.first)
        granted = groups.granted(grant.groups, have, grant.boundary) if is_sound_grant(grant) else None
        if granted is None:
            return MISMATCH
        blocks, end = granted
        last = grant.boundary or end
        if last > min(request.end, self.end) or not groups.is_named(self.plan.hashes, last, grant.last_hash):
            return MISMATCH
        if grant.boundary and not groups.keeps_prefix and not self._can_end_at(grant.boundary):
            return NOT_BEYOND if grant.boundary <= self.plan.start else ANOTHER_END
        request.granted(Segment(self._wanted(blocks), grant.until_s), end, now)
        if request.followed:  # Each chunk of a followed prompt takes time to compute, so the wait restarts.
            request.overdue_at = now + self.plan.follow_s
        return ""

    def _can_end_at(self, boundary: int) -> bool:
        """End there, if that is of use: until blocks are allocated, any boundary after ``FetchPlan.start`` is."""
        groups, start = self._groups, self.plan.start
        if boundary <= start:
            self.behind = max(self.behind, boundary)
            return False
        if groups.keeps_prefix or boundary == self.end:
            return True
        if self.begun:
            return False
        self.end = boundary
        for number, run in enumerate(self._progress):
            needed = groups.needed(number, start, boundary)
            if number in groups.full:
                run.cut(len(needed))
            else:
                self._progress[number] = BlockProgress(needed)
        return True

    def _wanted(self, granted: list[Blocks]) -> list[Blocks]:
        """Those of the blocks that no other lease has. They count as leased from now on."""
        wanted = []
        for blocks in granted:
            run = self._progress[blocks.group]
            for first, end in run.missing_runs(blocks.first, blocks.end):
                run.mark(first, end - first, GRANTED)
                wanted.append(blocks.within(first, end))
        return wanted

    def _request_missing(self, now: float) -> None:
        if not self._groups.keeps_prefix:
            self._request_all_missing(now)
            return
        self._request_missing_runs(now)

    def _request_missing_runs(self, now: float) -> None:
        """Request the missing blocks in order, up to the first one without a source: blocks after a gap are useless."""
        progress, size, open_until = self._progress[0], self._groups.stride, self._open_ends()
        index = progress.next_missing(progress.start)
        while index < progress.end:
            if index in open_until:
                end = open_until[index]
            elif (source := self._source_of(index)) is not None:
                end = progress.missing_until(index, min(source.end // size, progress.end, index + LEASE_BLOCKS_MAX))
                self._request_from(source, index * size, end * size, now)
                self._spent.update((source.peer, at) for at in range(index, end))
            else:
                return
            index = progress.next_missing(end)

    def _open_ends(self) -> dict[int, int]:
        """Per open request: index of its first ungranted block, and its end."""
        size = self._groups.stride
        return {
            max(request.granted_end, request.first) // size: request.end // size
            for request in self.requests
            if request.open
        }

    def _source_of(self, index: int) -> Source | None:
        position = index * self._groups.stride
        for source in self.plan.sources:
            if source.first <= position < source.end and (source.peer, index) not in self._spent:
                return source
        return None

    def _request_all_missing(self, now: float) -> None:
        """Request all that is missing from the next source, unless one is busy. A source that computes the prompt comes
        first; after blocks are allocated, only a source that reaches their boundary is of use.
        """
        if not self._misses_any or not self.over:
            return
        groups, plan = self._groups, self.plan
        promised = (self._progress[number].promised * groups.groups[number].block_size for number in groups.full)
        have = min(promised, default=plan.start) // groups.stride * groups.stride
        hashes_max = (first_hash(plan, have) + LEASE_BLOCKS_MAX) * groups.unit - groups.beyond
        for source in sorted(plan.sources, key=lambda source: not source.follow):
            end = groups.cut(min(source.end, self.end, hashes_max))
            if (source.peer, WHOLE) in self._spent or end <= plan.start or (self.begun and end < self.end):
                continue
            self._spent.add((source.peer, WHOLE))
            self._request_from(source, min(max(plan.start, have), end), end, now)
            return

    def _request_from(self, source: Source, first: int, end: int, now: float) -> None:
        """Send one lease request."""
        plan, limits = self.plan, self.plan.limits
        request = LeaseRequest(
            lease_id=new_lease_id(),
            peer=source.peer,
            first=first,
            end=end,
            requested_at=now,
            overdue_at=now + (plan.follow_s if source.follow else limits.answer_s_max),
            followed=source.follow,
            leg_id=source.leg_id,
            load_s=0.0 if source.follow else min(limits.load_s_max, source.worth_s or limits.load_s_max),
            listens=plan.shortcuts.listens(source.peer),
        )
        self.requests.append(request)
        plan.outbox.lease_requests.append(lease_message(plan, request))

    def _read_granted(self, now: float) -> None:
        if self._local is None or self.stopped:
            return
        for request in self.requests:
            ahead_s = self.plan.clock_ahead(request.peer) if request.segments else None
            while request.segments and ahead_s is not None:
                self._read(request, request.segments.popleft(), self._local, ahead_s, now)

    def _read(self, request: LeaseRequest, segment: Segment, local: list[Blocks], ahead_s: float, now: float) -> None:
        until_s = segment.until_s - ahead_s - self.plan.limits.margin_s
        for granted in segment.blocks:
            number = granted.group
            blocks = granted.within(local[number].first, local[number].end)
            if not blocks.ids:
                continue
            if now >= until_s:
                request.totals.fail("the lease is over")
                self._progress[number].mark(blocks.first, len(blocks.ids), MISSING)
                continue
            read = Read(
                read_id=self.plan.next_number(),
                peer=request.peer,
                remote_blocks=blocks.ids,
                local_blocks=local[number].within(blocks.first, blocks.end).ids,
                until_s=until_s,
                group=number,
                part_blocks=self.plan.outbox.part_blocks[number],
            )
            request.reading += len(blocks.ids)
            self._reads[read.read_id] = (request, number, blocks.first, len(blocks.ids))
            self.plan.outbox.reads.append(read)

    def _drop(self, request: LeaseRequest, why: str) -> None:
        """Expect nothing from this request but the reads under way."""
        for segment in request.segments:
            for blocks in segment.blocks:
                self._progress[blocks.group].mark(blocks.first, len(blocks.ids), MISSING)
        request.segments.clear()
        request.close(why)

    def _release(self, request: LeaseRequest) -> None:
        """Release the lease, once."""
        if request.released:
            return
        request.released = True
        self.plan.outbox.releases.append(release_message(self.plan, request))
