"""Fetch a run of blocks from other workers: request leases, read granted blocks, try other sources for the rest.

fetch = Fetch(plan, now)            lease requests go out at once
fetch.count()                       None while grants are awaited; then the number of blocks to allocate
fetch.begin(local_blocks, now)      blocks are allocated: reads begin
fetch.on_grant / on_part / on_time  events
fetch.over                          nothing is requested, read or leased any more; ``missing()`` did not arrive

Lease requests, releases, reads and cancellations are appended to the plan's ``Outbox``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from connector.messages import PeerKey, Read, ReadPart
from connector.reader.lease_request import LeaseRequest, Segment, Source
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    GROUP,
    LEASE_BLOCKS_MAX,
    GroupBlocks,
    KvGrant,
    KvOffer,
    KvRead,
    LeaseKv,
    NoGrant,
    ReleaseKv,
    is_sound_offer,
    new_lease_id,
    pack_full_hashes,
    unpack_block_ids,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Seconds."""

    answer_s_max: float = 0.5
    """Time limit for a holder to reply. Without a reply the blocks are requested elsewhere or computed."""
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


@dataclass(slots=True, kw_only=True)
class FetchPlan:
    """What to fetch, from which sources, for which reader."""

    reader: PeerKey
    hashes: Sequence[bytes]
    """Full hashes of the prompt's blocks, from the first on."""
    start: int
    """Index of the first missing block."""
    goal: int
    """Index after the last block to fetch."""
    sources: list[Source]
    take: KvOffer | None = None
    follow_s: float = 30.0
    """Maximum wait for the next blocks of a followed source."""
    hash_block_size: int
    limits: FetchLimits
    outbox: Outbox
    clock_ahead: Callable[[PeerKey], float | None]
    """The most that a peer's clock may be ahead of this one, seconds; None if it is not connected."""
    reply_to: str = ""
    """See ``LeaseKv.reply_to``."""
    next_number: Callable[[], int]
    """Numbers unique among all fetches of this reader."""


def lease_message(plan: FetchPlan, request: LeaseRequest) -> LeaseKv:
    return LeaseKv(
        worker_id=WorkerId(request.peer[0]),
        epoch=Epoch(request.peer[1]),
        reader_id=WorkerId(plan.reader[0]),
        ask_id=request.lease_id,
        hashes=pack_full_hashes(plan.hashes[request.first : request.end]),
        first=request.first,
        hold_s=plan.limits.hold_s,
        follow_s=plan.follow_s if request.followed else 0.0,
        leg_id=request.leg_id,
        reply_to=plan.reply_to,
    )


def release_message(plan: FetchPlan, request: LeaseRequest) -> ReleaseKv:
    ids = {"lease_ids": [request.lease_id]} if request.is_offer else {"ask_ids": [request.lease_id]}
    return ReleaseKv(
        worker_id=WorkerId(request.peer[0]), epoch=Epoch(request.peer[1]), reader_id=WorkerId(plan.reader[0]), **ids
    )


MISSING, GRANTED, ARRIVED = 0, 1, 2
"""States of a block: not leased; leased, perhaps being read; arrived."""


class BlockProgress:
    """A run of blocks, one byte each: every event searches it, and a long prompt has thousands of blocks."""

    def __init__(self, start: int, goal: int) -> None:
        self.start = start
        self._states = bytearray(max(0, goal - start))

    def __len__(self) -> int:
        return len(self._states)

    @property
    def end(self) -> int:
        """Index after the last block."""
        return self.start + len(self._states)

    @property
    def arrived(self) -> int:
        """Blocks of the longest prefix that arrived."""
        return len(self._states) - len(self._states.lstrip(bytes([ARRIVED])))

    @property
    def promised(self) -> int:
        """Blocks of the longest prefix that arrived or is leased."""
        return self.next_missing(self.start) - self.start

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
        found = self._states.find(MISSING, index - self.start)
        return self.end if found < 0 else self.start + found

    def missing_until(self, index: int, end: int) -> int:
        """End of the run of missing blocks that begins at ``index``, at most ``end``."""
        run = self._states[index - self.start : end - self.start]
        return index + len(run) - len(run.lstrip(bytes([MISSING])))

    def not_arrived(self) -> list[int]:
        """Offsets from ``start`` of the blocks that did not arrive."""
        return [place for place, state in enumerate(self._states) if state != ARRIVED]


class Fetch:
    """See the module. Times are on the reader's clock unless they say otherwise."""

    def __init__(self, plan: FetchPlan, now: float) -> None:
        self.plan = plan
        self.requests: list[LeaseRequest] = []
        self.stopped = False
        self._progress = BlockProgress(plan.start, plan.goal)
        self._spent: set[tuple[PeerKey, int]] = set()
        self._local: list[int] | None = None
        self._reads: dict[int, tuple[LeaseRequest, int, int]] = {}
        """Reads under way, by id: lease request, index of the first block, blocks that are not final."""
        self._peers_due_at = now + plan.limits.peer_s_max
        if plan.take is not None:
            self._take(plan.take, now)
        self._request_missing(now)

    def count(self) -> int | None:
        """Blocks from ``start`` on to allocate; None while it is not known.

        A followed prompt is still being computed, so all of its blocks are allocated at once and arrive one by one.
        """
        if any(request.open and request.followed for request in self.requests):
            return len(self._progress)
        if any(request.open for request in self.requests):
            return None
        return self._progress.promised

    @property
    def over(self) -> bool:
        """Nothing is requested or being read any more, and no byte moves."""
        return not any(request.busy for request in self.requests)

    @property
    def begun(self) -> bool:
        """Whether blocks to read into are allocated."""
        return self._local is not None

    @property
    def arrived(self) -> int:
        """Blocks of the longest prefix that arrived."""
        return self._progress.arrived

    @property
    def reads_under_way(self) -> int:
        return len(self._reads)

    def has_request(self, lease_id: str) -> bool:
        return any(request.lease_id == lease_id for request in self.requests)

    def granted_end(self, lease_id: str) -> int:
        """Index in the prompt after the last block that this request was granted; 0: none was."""
        return next((request.granted_end for request in self.requests if request.lease_id == lease_id), 0)

    def is_reading(self, read_id: int) -> bool:
        return read_id in self._reads

    def missing(self) -> list[int]:
        """Allocated local blocks whose content did not arrive."""
        local = self._local or []
        return [local[place] for place in self._progress.not_arrived() if place < len(local)]

    def reads(self) -> list[KvRead]:
        """Report of each source."""
        return [request.read() for request in self.requests]

    def begin(self, local_blocks: list[int], now: float) -> None:
        """Read into these blocks, the first of the run; the rest of the run is not needed any more."""
        self._local = local_blocks
        self._progress.cut(len(local_blocks))
        self._read_granted(now)

    def on_grant(self, grant: KvGrant, now: float) -> None:
        """A holder's reply. A grant that does not fit the request, or names other content, ends the request."""
        request = next((request for request in self.requests if request.lease_id == grant.ask_id), None)
        if request is None or not request.open or request.peer != (grant.worker_id, grant.epoch):
            return
        first, blocks = _blocks(grant.groups)
        if blocks is None:
            request.close("the grant cannot be read")
        elif blocks:
            if self._fits(request, grant, first, len(blocks)):
                request.granted(Segment(first, blocks, grant.until_s), now)
                self._progress.mark(first, len(blocks), GRANTED)
                if request.followed:  # Each chunk of a followed prompt takes time to compute, so the wait restarts.
                    request.overdue_at = now + self.plan.follow_s
            else:
                request.close("the grant does not match the request")
        if grant.final:
            request.close(str(grant.reason or ""))
        self._go_on(now)

    def on_part(self, part: ReadPart, now: float) -> None:
        """Blocks of a read are final."""
        request, first, left = self._reads.pop(part.read_id)
        begin = first + part.first
        request.reading -= part.count
        if left > part.count:
            self._reads[part.read_id] = (request, first, left - part.count)
        if part.failure:
            request.totals.fail(part.failure)
            self._progress.mark(begin, part.count, MISSING)
            self._spent.update((request.peer, index) for index in range(begin, begin + part.count))
        else:
            request.totals.tokens += part.count * self.plan.hash_block_size
            request.totals.moved(part.started_s, part.ended_s, part.bytes)
            self._progress.mark(begin, part.count, ARRIVED)
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
        blocks are requested by their hashes.
        """
        (first, blocks), hashes = _blocks(offer.groups), self.plan.hashes
        if (
            not is_sound_offer(offer)
            or first
            or not blocks
            or len(blocks) > len(hashes)
            or hashes[len(blocks) - 1] != offer.last_hash
        ):
            return
        end = min(len(blocks), self.plan.goal)
        request = LeaseRequest(
            lease_id=offer.lease_id,
            peer=(offer.worker_id, offer.epoch),
            first=self.plan.start,
            end=end,
            requested_at=now,
            overdue_at=now,
            is_offer=True,
            open=False,
        )
        self.requests.append(request)
        if end > self.plan.start:
            request.granted(Segment(self.plan.start, blocks[self.plan.start : end], offer.until_s), now)
            self._progress.mark(self.plan.start, end - self.plan.start, GRANTED)
        else:
            self._release(request)

    def _request_missing(self, now: float) -> None:
        """Request the missing blocks in order, up to the first one without a source: blocks after a gap are useless."""
        open_until = self._open_ends()
        index = self._progress.next_missing(self.plan.start)
        while index < self._progress.end:
            if index in open_until:
                end = open_until[index]
            elif (source := self._source_of(index)) is not None:
                end = self._request_from(source, index, now)
            else:
                return
            index = self._progress.next_missing(end)

    def _open_ends(self) -> dict[int, int]:
        """Per open request: index of its first ungranted block, and its end."""
        return {max(request.granted_end, request.first): request.end for request in self.requests if request.open}

    def _source_of(self, index: int) -> Source | None:
        for source in self.plan.sources:
            if source.first <= index < source.end and (source.peer, index) not in self._spent:
                return source
        return None

    def _request_from(self, source: Source, index: int, now: float) -> int:
        """Send one lease request; returns its end."""
        plan, limits = self.plan, self.plan.limits
        end = self._progress.missing_until(index, min(source.end, self._progress.end, index + LEASE_BLOCKS_MAX))
        request = LeaseRequest(
            lease_id=new_lease_id(),
            peer=source.peer,
            first=index,
            end=end,
            requested_at=now,
            overdue_at=now + (plan.follow_s if source.follow else limits.answer_s_max),
            followed=source.follow,
            leg_id=source.leg_id,
        )
        self.requests.append(request)
        self._spent.update((source.peer, at) for at in range(index, end))
        plan.outbox.lease_requests.append(lease_message(plan, request))
        return end

    def _fits(self, request: LeaseRequest, grant: KvGrant, first: int, count: int) -> bool:
        end = first + count
        return (
            first == max(request.granted_end, request.first)
            and end <= request.end
            and end <= self._progress.end
            and grant.last_hash == self.plan.hashes[end - 1]
        )

    def _read_granted(self, now: float) -> None:
        if self._local is None or self.stopped:
            return
        for request in self.requests:
            ahead_s = self.plan.clock_ahead(request.peer) if request.segments else None
            while request.segments and ahead_s is not None:
                self._read(request, request.segments.popleft(), ahead_s, now)

    def _read(self, request: LeaseRequest, segment: Segment, ahead_s: float, now: float) -> None:
        start, local = self.plan.start, self._local or []
        count = min(len(segment.block_ids), start + len(local) - segment.first)
        until_s = segment.until_s - ahead_s - self.plan.limits.margin_s
        if count <= 0:
            return
        if now >= until_s:
            request.totals.fail("the lease is over")
            self._progress.mark(segment.first, count, MISSING)
            return
        read = Read(
            read_id=self.plan.next_number(),
            peer=request.peer,
            remote_blocks=segment.block_ids[:count],
            local_blocks=local[segment.first - start : segment.first - start + count],
            until_s=until_s,
            group=GROUP,
            part_blocks=self.plan.outbox.part_blocks[GROUP],
        )
        request.reading += count
        self._reads[read.read_id] = (request, segment.first, count)
        self.plan.outbox.reads.append(read)

    def _drop(self, request: LeaseRequest, why: str) -> None:
        """Expect nothing from this request but the reads under way."""
        for segment in request.segments:
            self._progress.mark(segment.first, len(segment.block_ids), MISSING)
        request.segments.clear()
        request.close(why)

    def _release(self, request: LeaseRequest) -> None:
        """Release the lease, once."""
        if request.released:
            return
        request.released = True
        self.plan.outbox.releases.append(release_message(self.plan, request))


def _blocks(groups: list[GroupBlocks]) -> tuple[int, list[int] | None]:
    """Index in the prompt of the first block, and the blocks; None instead of them if malformed."""
    if not groups:
        return 0, []
    if len(groups) > 1:
        return 0, None
    try:
        return groups[GROUP].first, unpack_block_ids(groups[GROUP].block_ids)
    except ValueError:
        return 0, None
