"""Several simulated engines that exchange KV in virtual time, without workers and bus."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from connector.messages import EngineCall, EngineNotification, Peer, PeerGone
from connector.transfer.memory_agent import MemoryNetwork
from services.worker.engines.simulated.core.batch import RequestParams, Sequence
from services.worker.engines.simulated.core.engine_core import EngineCore, ModelTokens
from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.engines.simulated.kv_exchange import DirectMover, agent_name, direct_mover
from shared.contracts.kv_exchange import KvGrant, LeaseKv, ReleaseKv

LATENCY_S = 0.001
EVENTS_MAX = 500_000

Message = LeaseKv | KvGrant | ReleaseKv
Carry = Callable[[Message], list[tuple[float, Message]]]
"""What becomes of a message: delays and what arrives after them. Nothing: it is lost."""


def carried_well(message: Message) -> list[tuple[float, Message]]:
    return [(LATENCY_S, message)]


class Member:
    """One engine with its mover. Its clock is ``ahead_s`` before the fleet's."""

    def __init__(self, settings: SimulationSettings, model: ModelTokens, network: MemoryNetwork, ahead_s: float, clock):
        self.key = (settings.worker_id, settings.epoch)
        self.ahead_s = ahead_s
        self._fleet_now = clock
        self._woken_at = ahead_s
        self.core = EngineCore(settings, model)
        self.agent = network.agent(agent_name(*self.key))
        self.mover: DirectMover = direct_mover(self.core, self.agent, "one-model", self.now)
        self.alive = True
        self.wakes_at: float | None = None
        self.fetched = {}
        self.states = []
        self.connected = []

    def now(self) -> float:
        """Not a rounding error earlier than it wanted to be woken."""
        return max(self._fleet_now() + self.ahead_s, self._woken_at)

    def woken(self, at: float) -> None:
        """It is that time on its clock."""
        self._woken_at = at


class Fleet:
    """Members by worker id, and everything that is under way between them."""

    def __init__(self, model: ModelTokens, *, carry: Carry = carried_well) -> None:
        self.now = 0.0
        self.carry = carry
        self.members: dict[str, Member] = {}
        self.network = MemoryNetwork()
        self.on_ended: Callable[[Sequence], None] = lambda _sequence: None
        self.on_step: Callable[[Member], None] = lambda _member: None
        self._model = model
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def add(self, settings: SimulationSettings, *, ahead_s: float = 0.0) -> Member:
        """A new life of a worker, connected with all that are there."""
        member = Member(settings, self._model, self.network, ahead_s, lambda: self.now)
        self.members[settings.worker_id] = member
        for other in list(self.members.values()):
            if other is not member and other.alive:
                self.introduce(other, to=member)
                self.introduce(member, to=other)
        return member

    def introduce(self, member: Member, *, to: Member, error_s: float = 0.002) -> None:
        """As a handshake does."""
        notifications = member.core.call(EngineCall(describe=True), member.now())
        self.deliver(notifications, member)
        ahead_s = member.ahead_s - to.ahead_s + error_s
        self.call(to, EngineCall(peers=[Peer(handshake=notifications.handshake, clock_ahead_s=ahead_s)]))

    def kill(self, member: Member, *, notice_s: float = 0.0) -> None:
        """It is gone at once; the others learn of it later."""
        member.alive = False
        member.mover.close()
        gone = EngineCall(gone=[PeerGone(worker_id=member.key[0], epoch=member.key[1])])
        self.later(notice_s, lambda: [self.call(other, gone) for other in self.members.values() if other.alive])

    def call(self, member: Member, call: EngineCall) -> None:
        """From its worker."""
        self.deliver(member.core.call(call, member.now()), member)
        self.step(member)

    def step(self, member: Member) -> None:
        """What the engine's loop does."""
        if not member.alive:
            return
        core = member.core
        ended = [sequence for sequence, _ in core.advance(member.now()) if sequence.finish_reason]
        orders = core.exchange.take_orders()
        member.mover.submit(orders)
        if core.exchange.moving or orders:
            results = member.mover.take_results()
            if results:
                core.results(results, member.now())
                self.wake(member, member.now())
        notifications = core.exchange.take_notifications()
        if notifications is not None:
            self.deliver(notifications, member)
        wakes_at = core.wakes_at()
        if wakes_at is not None:
            self.wake(member, wakes_at)
        self.on_step(member)
        for sequence in ended:
            self.on_ended(sequence)

    def wake(self, member: Member, at: float) -> None:
        """Have a turn then, on its clock; earlier ones stay."""
        if member.wakes_at is None or at < member.wakes_at:
            member.wakes_at = at
            self.at(at - member.ahead_s, lambda: self._woken(member, at))

    def _woken(self, member: Member, at: float) -> None:
        if member.wakes_at == at:
            member.wakes_at = None
            member.woken(at)
            self.step(member)

    def deliver(self, notifications: EngineNotification, sender: Member) -> None:
        """Over the bus."""
        member_of = self.members.get
        for fetch in notifications.fetched:
            sender.fetched[fetch.fetch_id] = fetch.result
        sender.connected += notifications.connected
        if notifications.state is not None:
            sender.states.append(notifications.state)
        for message in (*notifications.leases, *notifications.grants, *notifications.releases):
            to = message.reader_id if isinstance(message, KvGrant) else message.worker_id
            for delay_s, arrives in self.carry(message):
                self.later(delay_s, lambda arrives=arrives, to=to: self._arrive(member_of(to), arrives))

    def _arrive(self, member: Member | None, message: Message) -> None:
        if member is None or not member.alive:
            return
        if isinstance(message, LeaseKv):
            self.call(member, EngineCall(leases=[message]))
        elif isinstance(message, KvGrant):
            self.call(member, EngineCall(grants=[message]))
        else:
            self.call(member, EngineCall(releases=[message]))

    def ask(self, member: Member, tokens: list[int], params: RequestParams, owner: object = None) -> Sequence:
        sequence = member.core.add(owner, list(tokens), params, member.now())
        self.step(member)
        return sequence

    def abort(self, member: Member, sequence: Sequence) -> None:
        member.core.abort(sequence)
        self.step(member)

    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), do))

    def later(self, delay_s: float, do: Callable[[], None]) -> None:
        self.at(self.now + delay_s, do)

    def run(self, *, until: float = float("inf")) -> float:
        """Until nothing is left to do, or that time."""
        for _ in range(EVENTS_MAX):
            if not self._events or self._events[0][0] > until:
                self.now = max(self.now, until) if until != float("inf") else self.now
                return self.now
            self.now, _, do = heapq.heappop(self._events)
            do()
        raise AssertionError("the fleet never comes to rest")

    def until(self, done: Callable[[], object]) -> float:
        for _ in range(EVENTS_MAX):
            if done():
                return self.now
            assert self._events, "nothing is left to do"
            self.now, _, do = heapq.heappop(self._events)
            do()
        raise AssertionError("it never happens")

    def answer(self, member: Member, tokens: list[int], params: RequestParams) -> Sequence:
        """A finished request."""
        sequence = self.ask(member, tokens, params)
        self.until(lambda: sequence.finish_reason)
        return sequence
