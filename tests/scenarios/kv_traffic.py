"""Seeded random requests to a fleet of simulated engines, with message faults, worker deaths and client aborts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from connector.messages import EngineCall, StartFetch
from services.worker.engines.simulated.core.batch import ABORT, CACHE_THRESHOLD, RequestParams, Sequence
from shared.contracts.ids import NO_LEG, LegId
from shared.contracts.kv_exchange import FetchKv, GroupBlocks, KvGrant, KvOffer, KvSource, LegOrder, pack_full_hashes
from tests.unit.worker.simulated.builders import BLOCK, MODEL, VOCABULARY, answer, completion, engine, settings
from tests.unit.worker.simulated.fleet import LATENCY_S, Carry, Fleet, Member, Message

WAIT_S_MAX = 3.0
ANSWER_TOKENS_MAX = 12
BLOCKS = 192
CLOCKS_APART_S = 1000.0


@dataclass(eq=False)
class Request:
    """A client's request and its legs."""

    prompt: list[int]
    max_tokens: int
    kind: str
    legs: list[tuple[Member, Sequence]] = field(default_factory=list)
    end: str = ""


def lossy(rng: random.Random, *, lost=0.0, late=0.0, twice=0.0, corrupted=0.0, outage=0.0) -> Carry:
    """A bus that loses, delays (and so reorders), repeats and corrupts messages, each with its probability.

    ``outage`` is the probability that a message begins a run of up to 99 lost ones.
    """
    lost_in_a_row = 0

    def carry(message: Message) -> list[tuple[float, Message]]:
        nonlocal lost_in_a_row
        if rng.random() < outage:
            lost_in_a_row = rng.randrange(100)
        if lost_in_a_row or rng.random() < lost:
            lost_in_a_row = max(0, lost_in_a_row - 1)
            return []
        if isinstance(message, KvGrant) and rng.random() < corrupted:
            message = corrupt(rng, message)
        delay_s = rng.uniform(0.0, 1.0) if rng.random() < late else LATENCY_S
        copies = [(delay_s, message)]
        if rng.random() < twice:
            copies.append((delay_s + rng.uniform(0.0, 0.5), message))
        return copies

    return carry


def corrupt(rng: random.Random, grant: KvGrant) -> KvGrant:
    """A grant that no holder sends, or that belongs to another epoch or prompt."""
    blocks = grant.groups[0] if grant.groups else GroupBlocks(first=0, block_ids=b"")
    changes: dict[str, object] = rng.choice(
        [
            {"groups": [replace(blocks, block_ids=blocks.block_ids[:-4])]},
            {"groups": [replace(blocks, block_ids=blocks.block_ids[:-1])]},
            {"groups": [replace(blocks, block_ids=blocks.block_ids * 3)]},
            {"groups": [blocks, blocks]},
            {"last_hash": bytes(32)},
            {"epoch": grant.epoch - 1},
            {"groups": [replace(blocks, first=blocks.first + 1)]},
            {"until_s": grant.until_s - 1000.0},
            {"ask_id": "unknown-request"},
            {"final": True},
        ]
    )
    return replace(grant, **changes)


class Traffic:
    """Plays the router and the clients of a fleet."""

    def __init__(self, seed: int, *, workers: int, carry: Callable[[random.Random], Carry] = lossy, **engines) -> None:
        self.rng = random.Random(seed)
        self.fleet = Fleet(MODEL, carry=carry(self.rng))
        self.fleet.on_ended = self._ended
        self.requests: list[Request] = []
        self.transfer_reports = Counter()
        self.kills = 0
        self.prefetches: dict[str, Member] = {}
        self._engines = {"kv_blocks": BLOCKS, "max_num_batched_tokens": 64, "kv_lease_s": 5.0, **engines}
        self._done: list[Request] = []
        self._epochs = Counter()
        self._truth = engine(kv_blocks=20_000, max_num_batched_tokens=4096)
        self._waiting: dict[Sequence, Callable[[], None]] = {}
        for number in range(workers):
            self.start(f"w{number}")

    def start(self, worker_id: str) -> Member:
        """Start the worker's next epoch."""
        self._epochs[worker_id] += 1
        made = settings(worker_id=worker_id, epoch=self._epochs[worker_id], **self._engines)
        return self.fleet.add(made, ahead_s=self.rng.uniform(0.0, CLOCKS_APART_S))

    def alive(self) -> list[Member]:
        return [member for member in self.fleet.members.values() if member.alive]

    # Events

    def send(self, count: int, *, per_s: float, aborted: float = 0.0) -> None:
        """Send ``count`` requests at random times; clients abort the share ``aborted`` of them."""
        at = self.fleet.now
        for _ in range(count):
            at += self.rng.expovariate(per_s)
            self.fleet.at(at, lambda: self._send(aborted))

    def kill_at_random(self, count: int, *, every_s: float) -> None:
        """Workers die, are reported gone some time later, and restart with a new epoch."""
        for number in range(count):
            self.fleet.later(every_s * (number + self.rng.random()), self._kill)

    def prefetch_at_random(self, count: int, *, every_s: float) -> None:
        """Workers are ordered to fetch prompts that other workers have completed."""
        for number in range(count):
            self.fleet.later(every_s * (number + self.rng.random()), self._prefetch)

    def _prefetch(self) -> None:
        if not self._done:
            return
        holder, sequence = self.rng.choice(self._done[-20:]).legs[-1]
        member = self.rng.choice(self.alive())
        fetch_id = f"f{len(self.prefetches)}"
        self.prefetches[fetch_id] = member
        fetch = FetchKv(
            worker_id=member.key[0],
            sender_id=holder.key[0],
            hashes=pack_full_hashes(sequence.hashes),
            sources=[source_of(holder)],
            deadline_s=self.rng.uniform(0.01, 3.0),
        )
        self.fleet.call(member, EngineCall(fetches=[StartFetch(fetch_id=fetch_id, fetch=fetch)]))

    def run(self) -> None:
        """Run until no event is left."""
        self.fleet.run()

    def _kill(self) -> None:
        member = self.rng.choice(self.alive())
        self.kills += 1
        for request in self.requests:
            for on, sequence in request.legs:
                if on is member and not sequence.finish_reason and sequence is request.legs[-1][1] and not request.end:
                    request.end = "worker lost"
        self.fleet.kill(member, notice_s=self.rng.uniform(0.0, 2.0))
        self.fleet.later(self.rng.uniform(0.1, 3.0), lambda: self.start(member.key[0]))

    def _send(self, aborted: float) -> None:
        kinds = (
            self._aggregated,
            self._handed_over,
            self._handed_over,
            self._streamed,
            self._read_back,
            self._with_threshold,
        )
        request = self.rng.choice(kinds)()
        self.requests.append(request)
        if self.rng.random() < aborted:
            self.fleet.later(self.rng.expovariate(20.0), lambda: self._abort(request))

    def _abort(self, request: Request) -> None:
        if request.end:
            return
        request.end = "client gone"
        for member, sequence in request.legs:
            if member.alive and not sequence.finish_reason:
                self.fleet.abort(member, sequence)

    def _leg(self, request: Request, member: Member, order: LegOrder, max_tokens: int) -> Sequence:
        params = RequestParams(max_tokens=max_tokens, ignore_eos=True, order=order)
        sequence = member.core.add(request, list(request.prompt), params, member.now())
        request.legs.append((member, sequence))
        return sequence

    # Kinds of requests

    def _request(self, kind: str) -> Request:
        """A request with a random prompt; prompts of one family share a prefix."""
        family, length = self.rng.randrange(8), self.rng.randrange(1, 40) * BLOCK + self.rng.randrange(BLOCK)
        shared = [(family * 7 + index * 3) % VOCABULARY for index in range(self.rng.randrange(0, 60))]
        own = [self.rng.randrange(10, VOCABULARY) for _ in range(max(1, length - len(shared)))]
        return Request(
            prompt=(shared + own)[: length + 1], max_tokens=self.rng.randint(1, ANSWER_TOKENS_MAX), kind=kind
        )

    def _pair(self) -> tuple[Member, Member]:
        one, other = self.rng.sample(self.alive(), 2)
        return one, other

    def _aggregated(self) -> Request:
        request = self._request("aggregated")
        member = self.rng.choice(self.alive())
        self._leg(request, member, LegOrder(), request.max_tokens)
        self.fleet.step(member)
        return request

    def _handed_over(self) -> Request:
        request = self._request("handed over")
        holder, reader = self._pair()
        prefill = self._leg(request, holder, LegOrder(offer=True), 1)
        self._waiting[prefill] = lambda: self._decode(request, reader, prefill)
        self.fleet.step(holder)
        return request

    def _decode(self, request: Request, reader: Member, prefill: Sequence) -> None:
        if request.end:
            return
        if not reader.alive:
            request.end = "worker lost"
            return
        offer: KvOffer | None = prefill.stats.transfer_report.offer
        self._leg(request, reader, LegOrder(take=offer), request.max_tokens)
        self.fleet.step(reader)

    def _streamed(self) -> Request:
        request = self._request("streamed")
        holder, reader = self._pair()
        leg_id = LegId(f"leg-{len(self.requests)}")
        self._leg(request, holder, LegOrder(leg_id=leg_id), 1)
        order = LegOrder(sources=[source_of(holder, follow=True, leg_id=leg_id)], wait_s_max=WAIT_S_MAX)
        self._leg(request, reader, order, request.max_tokens)
        for member in self.rng.sample([holder, reader], 2):
            self.fleet.step(member)
        return request

    def _read_back(self) -> Request:
        completed = [one for one in self._done[-50:] if len(one.prompt) < 200]
        if not completed:
            return self._aggregated()
        previous = self.rng.choice(completed)
        request = self._request("read back")
        request.prompt = [*previous.legs[-1][1].tokens, *request.prompt[:20]]
        if self.rng.random() < 0.2:
            request.prompt[self.rng.randrange(len(request.prompt))] = 5
        sources = [source_of(member) for member, _ in previous.legs] + [source_of(self._pair()[0])]
        member = self.rng.choice(self.alive())
        self._leg(request, member, LegOrder(sources=sources, wait_s_max=WAIT_S_MAX), request.max_tokens)
        self.fleet.step(member)
        return request

    def _with_threshold(self) -> Request:
        request = self._request("with threshold")
        holder, member = self._pair()
        order = LegOrder(sources=[source_of(holder)], cache_hit_threshold=self.rng.random(), wait_s_max=WAIT_S_MAX)
        self._leg(request, member, order, request.max_tokens)
        self.fleet.step(member)
        return request

    # Results

    def _ended(self, sequence: Sequence) -> None:
        request: Request = sequence.owner
        if (continuation := self._waiting.pop(sequence, None)) is not None:
            continuation()
            return
        if sequence is not request.legs[-1][1] or request.end:
            return
        request.end = sequence.finish_reason
        self.check_report(sequence)
        if request.end not in (CACHE_THRESHOLD, ABORT):
            self._done.append(request)

    def check_report(self, sequence: Sequence) -> None:
        """Assert that the transfer report's tokens add up, and sum them."""
        transfer_report = sequence.stats.transfer_report
        assert transfer_report is not None
        if not transfer_report.refused:
            assert transfer_report.prompt_tokens == sequence.prompt_tokens
            assert (
                transfer_report.local_tokens + transfer_report.fetched_tokens + transfer_report.recomputed_tokens
                == transfer_report.prompt_tokens
            )
        for name in ("local_tokens", "fetched_tokens", "recomputed_tokens", "refetched_tokens", "preemptions"):
            assert getattr(transfer_report, name) >= 0
            self.transfer_reports[name] += getattr(transfer_report, name)

    def right_tokens(self, request: Request) -> list[int]:
        """Output of one engine without an exchange."""
        params = RequestParams(max_tokens=request.max_tokens, ignore_eos=True)
        return completion(answer(self._truth, request.prompt, params))

    def check_answers(self) -> Counter:
        """Assert that each request ended with the right tokens or with a reason; returns the number of requests by end."""
        for request in self.requests:
            assert request.end, f"{request.kind} never ended"
            if request.end == "length":
                assert completion(request.legs[-1][1]) == self.right_tokens(request), request.kind
        for fetch_id, member in self.prefetches.items():
            assert fetch_id in member.fetched or not member.alive, "a fetch was never reported"
        return Counter(request.end for request in self.requests)

    def check_idle(self) -> None:
        """Assert that no engine has a request, a pinned block, a lease or a read."""
        for member in self.alive():
            core = member.core
            assert not list(core.batch.unfinished())
            assert core.cache.free == core.cache.blocks
            assert core.exchange.holder.counts.pinned_blocks == 0
            assert core.exchange.holder.counts.leases == 0
            assert core.exchange.reader.idle
            assert core.wakes_at() is None


def source_of(member: Member, *, follow: bool = False, leg_id: LegId = NO_LEG) -> KvSource:
    return KvSource(worker_id=member.key[0], epoch=member.key[1], follow=follow, leg_id=leg_id)
