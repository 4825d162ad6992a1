"""Fetch a run of blocks from other workers: ask, take what is granted, read, ask elsewhere for what is missing.

fetch = Fetch(plan, now)            asks go out at once
fetch.count()                       None while answers are awaited; then how many blocks to make room for
fetch.begin(local_blocks, now)      room is made: reads begin
fetch.on_grant / on_part / on_time  what happens
fetch.over                          nothing is asked, read or leased any more; ``missing()`` did not arrive

Whatever is to be done about it (asks, releases, reads, cancels) is appended to the plan's ``Outbox``.
"""

from __future__ import annotations

from connector.orders import PeerKey, Read, ReadPart
from connector.reader.block_progress import ARRIVED, GRANTED, MISSING, BlockProgress
from connector.reader.fetch_plan import FetchPlan, lease_of, release_of
from connector.reader.lease_request import LeaseRequest, Segment, Source
from shared.contracts.kv_exchange import LEASE_BLOCKS_MAX, KvGrant, KvOffer, KvRead, NoGrant, unpack_block_ids


class Fetch:
    """See the module. Times are on the reader's clock unless they say otherwise."""

    def __init__(self, plan: FetchPlan, now: float) -> None:
        self.plan = plan
        self.asks: list[LeaseRequest] = []
        self.stopped = False
        self._progress = BlockProgress(plan.start, plan.goal)
        self._spent: set[tuple[PeerKey, int]] = set()
        self._local: list[int] | None = None
        self._reads: dict[
            int, tuple[LeaseRequest, int, int]
        ] = {}  # under way: whose, its first index, blocks not final
        self._peers_due_at = now + plan.limits.peer_s_max
        if plan.take is not None:
            self._take(plan.take, now)
        self._ask(now)

    def count(self) -> int | None:
        """Blocks behind ``start`` to make room for; None while it is not known."""
        if any(ask.open and ask.followed for ask in self.asks):
            return len(self._progress)
        if any(ask.open for ask in self.asks):
            return None
        return self._progress.promised

    @property
    def over(self) -> bool:
        """Nothing is asked or being read any more, and no byte moves."""
        return not any(ask.busy for ask in self.asks)

    @property
    def begun(self) -> bool:
        """Whether there is room to read into."""
        return self._local is not None

    @property
    def arrived(self) -> int:
        """Blocks of the longest prefix that arrived."""
        return self._progress.arrived

    @property
    def reads_under_way(self) -> int:
        """Reads that are not over."""
        return len(self._reads)

    def asked(self, ask_id: str) -> bool:
        """Whether that ask is one of ours."""
        return any(ask.ask_id == ask_id for ask in self.asks)

    def reads_as(self, read_id: int) -> bool:
        """Whether that read is one of ours, and under way."""
        return read_id in self._reads

    def missing(self) -> list[int]:
        """Local blocks that were made room for and hold nothing."""
        local = self._local or []
        return [local[place] for place in self._progress.not_arrived() if place < len(local)]

    def reads(self) -> list[KvRead]:
        """What came of each source."""
        return [ask.read() for ask in self.asks]

    def begin(self, local_blocks: list[int], now: float) -> None:
        """There is room for the first ``len(local_blocks)`` blocks behind ``start``; the rest is not wanted."""
        self._local = local_blocks
        self._progress.cut(len(local_blocks))
        self._read_granted(now)

    def on_grant(self, grant: KvGrant, now: float) -> None:
        """A holder answers. What does not fit the ask, or names other content, is not believed."""
        ask = next((ask for ask in self.asks if ask.ask_id == grant.ask_id), None)
        if ask is None or not ask.open or ask.peer != (grant.worker_id, grant.epoch):
            return
        blocks = _blocks(grant.block_ids)
        if blocks is None:
            ask.close("the grant cannot be read")
        elif blocks:
            first = max(ask.granted_end, ask.first)
            if self._fits(ask, grant, first, len(blocks)):
                ask.granted(Segment(first, blocks, grant.until_s), now)
                self._progress.mark(first, len(blocks), GRANTED)
                if ask.followed:  # The prompt is being computed: what comes next has its own time.
                    ask.overdue_at = now + self.plan.follow_s
            else:
                ask.close("the grant does not match what was asked")
        if grant.final:
            ask.close(str(grant.reason or ""))
        self._go_on(now)

    def on_part(self, part: ReadPart, now: float) -> None:
        """Blocks of a read are final."""
        ask, first, left = self._reads.pop(part.read_id)
        ask.reading -= part.count
        if left > part.count:
            self._reads[part.read_id] = (ask, first, left - part.count)
        if part.failure:
            ask.story.fail(part.failure)
            self._progress.mark(first + part.first, part.count, MISSING)
            self._spent.update(
                (ask.peer, index) for index in range(first + part.first, first + part.first + part.count)
            )
        else:
            ask.story.tokens += part.count * self.plan.block_tokens
            ask.story.moved(part.started_s, part.ended_s, part.bytes)
            self._progress.mark(first + part.first, part.count, ARRIVED)
        self._go_on(now)

    def on_peer(self, now: float) -> None:
        """A peer was connected: it may be one of ours."""
        self._read_granted(now)

    def on_peer_gone(self, peer: PeerKey, now: float) -> None:
        """That life of a worker is over."""
        for ask in self.asks:
            if ask.peer == peer:
                self._drop(ask, "the worker is gone")
                ask.released = True
        self._go_on(now)

    def on_time(self, now: float) -> None:
        """Call now and then: what is overdue is given up."""
        for ask in self.asks:
            if ask.open and now >= ask.overdue_at:
                late = NoGrant.FOLLOW_OVER if ask.followed else NoGrant.UNREACHABLE
                ask.close(str(late))
            if ask.segments and now >= self._peers_due_at and self.plan.clock_ahead(ask.peer) is None:
                self._drop(ask, "not connected")
        self._go_on(now)

    def stop(self) -> None:
        """Nobody wants it any more. ``over`` when the reads under way are truly over."""
        self.stopped = True
        for ask in self.asks:
            ask.open = False
            ask.segments.clear()
            self._release(ask)
        self.plan.outbox.cancel.extend(self._reads)

    def _go_on(self, now: float) -> None:
        if self.stopped:
            return
        self._read_granted(now)
        self._ask(now)
        for ask in self.asks:
            if not ask.busy:
                self._release(ask)

    def _take(self, offer: KvOffer, now: float) -> None:
        """Use an offer if it is of the very same prompt: an edited history has other hashes, and is fetched by them."""
        blocks, hashes = _blocks(offer.block_ids) or [], self.plan.hashes
        if not 0 < len(blocks) <= len(hashes) or hashes[len(blocks) - 1] != offer.last_hash:
            return
        end = min(len(blocks), self.plan.goal)
        ask = LeaseRequest(
            ask_id=offer.lease_id,
            peer=(offer.worker_id, offer.epoch),
            first=self.plan.start,
            end=end,
            asked_at=now,
            overdue_at=now,
            is_offer=True,
            open=False,
        )
        self.asks.append(ask)
        if end > self.plan.start:
            ask.granted(Segment(self.plan.start, blocks[self.plan.start : end], offer.until_s), now)
            self._progress.mark(self.plan.start, end - self.plan.start, GRANTED)
        else:
            self._release(ask)

    def _ask(self, now: float) -> None:
        """LeaseRequest for what nobody has granted or been asked for, in order; behind a gap nothing is of use."""
        open_until = self._open_ends()
        index = self._progress.next_missing(self.plan.start)
        while index < self._progress.end:
            if index in open_until:
                behind = open_until[index]
            elif (source := self._source_of(index)) is not None:
                behind = self._ask_one(source, index, now)
            else:
                return
            index = self._progress.next_missing(behind)

    def _open_ends(self) -> dict[int, int]:
        """Where each open ask's ungranted blocks begin, and behind their end."""
        return {max(ask.granted_end, ask.first): ask.end for ask in self.asks if ask.open}

    def _source_of(self, index: int) -> Source | None:
        for source in self.plan.sources:
            if source.first <= index < source.end and (source.peer, index) not in self._spent:
                return source
        return None

    def _ask_one(self, source: Source, index: int, now: float) -> int:
        """Send one ask; answers the index behind it."""
        plan, limits = self.plan, self.plan.limits
        end = self._progress.missing_until(index, min(source.end, self._progress.end, index + LEASE_BLOCKS_MAX))
        ask = LeaseRequest(
            ask_id=f"{plan.reader[0]}-{plan.reader[1]}-{plan.next_number()}",
            peer=source.peer,
            first=index,
            end=end,
            asked_at=now,
            overdue_at=now + (plan.follow_s if source.follow else limits.answer_s_max),
            followed=source.follow,
        )
        self.asks.append(ask)
        self._spent.update((source.peer, at) for at in range(index, end))
        plan.outbox.lease_requests.append(lease_of(plan, ask))
        return end

    def _fits(self, ask: LeaseRequest, grant: KvGrant, first: int, count: int) -> bool:
        behind = first + count
        return (
            grant.first == first - ask.first
            and behind <= ask.end
            and behind <= self._progress.end
            and grant.last_hash == self.plan.hashes[behind - 1]
        )

    def _read_granted(self, now: float) -> None:
        if self._local is None or self.stopped:
            return
        for ask in self.asks:
            ahead_s = self.plan.clock_ahead(ask.peer) if ask.segments else None
            while ask.segments and ahead_s is not None:
                self._read(ask, ask.segments.popleft(), ahead_s, now)

    def _read(self, ask: LeaseRequest, segment: Segment, ahead_s: float, now: float) -> None:
        start, local = self.plan.start, self._local or []
        count = min(len(segment.block_ids), start + len(local) - segment.first)
        until_s = segment.until_s - ahead_s - self.plan.limits.margin_s
        if count <= 0:
            return
        if now >= until_s:
            ask.story.fail("the lease is over")
            self._progress.mark(segment.first, count, MISSING)
            return
        read = Read(
            read_id=self.plan.next_number(),
            peer=ask.peer,
            remote_blocks=segment.block_ids[:count],
            local_blocks=local[segment.first - start : segment.first - start + count],
            until_s=until_s,
        )
        ask.reading += count
        self._reads[read.read_id] = (ask, segment.first, count)
        self.plan.outbox.reads.append(read)

    def _drop(self, ask: LeaseRequest, why: str) -> None:
        """Nothing that is not being read already will come from it."""
        for segment in ask.segments:
            self._progress.mark(segment.first, len(segment.block_ids), MISSING)
        ask.segments.clear()
        ask.close(why)

    def _release(self, ask: LeaseRequest) -> None:
        """Tell the holder, once, that its blocks are free of us."""
        if ask.released:
            return
        ask.released = True
        self.plan.outbox.releases.append(release_of(self.plan, ask))


def _blocks(packed: bytes) -> list[int] | None:
    """None: no holder of ours packs like this."""
    try:
        return unpack_block_ids(packed)
    except ValueError:
        return None
