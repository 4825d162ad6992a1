"""Clients: each request of a trace is sent at its time to one of the routers, and what becomes of it is recorded."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

import httpx
import msgspec

from tests.nightly.chaos.apis import body_of, read_event, read_whole
from tests.nightly.chaos.outcomes import OK, Outcome
from tests.nightly.chaos.trace import Ask

PATIENCE_S = 90.0
"""A client that still waits then goes home: the request has not ended in any way that is promised."""
NOBODY_THERE_S_MAX = 40.0
"""For any router to take a connection."""
CHECK_S = 0.1
LAG_CHECK_S = 0.1
HEALTH_S, HEALTH_S_MAX = 0.25, 1.0
"""A router that is not ready, or does not say so in time, gets no new connections: as load balancers have it."""
KEPT_S = 60.0
"""A client that keeps its connection closes it after so long without a request."""
DATA = "data: "

Router = tuple[str, str]
"""Name and address."""


class Kept:
    """A client with a connection that it keeps, to the router that took it."""

    def __init__(self) -> None:
        self.http = httpx.AsyncClient(
            timeout=httpx.Timeout(PATIENCE_S),
            limits=httpx.Limits(max_connections=1, keepalive_expiry=KEPT_S),
            trust_env=False,
        )
        self.router: Router | None = None
        self.turn = asyncio.Lock()
        """Held by the request that uses the connection."""
        self._local: tuple[str, int] | None = None

    def reuses(self, answer: httpx.Response) -> bool:
        """Whether this answer came by the connection of the one before."""
        local = answer.extensions["network_stream"].get_extra_info("client_addr")
        before, self._local = self._local, local
        return local == before


class Traffic:
    """Sends, and keeps every outcome. ``now`` are the seconds of the run."""

    def __init__(self, routers: Sequence[Router], now: Callable[[], float]) -> None:
        self.outcomes: list[Outcome] = []
        self.under_way = 0
        self._routers = list(routers)
        self._fit: list[Router] = []
        self._unfit_since: dict[str, float] = {}
        """When routers that are not ready were first found so."""
        self._lag_s = 0.0
        """How long this process was kept from running, since the beginning."""
        self._turns = itertools.count()
        self._now = now
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(PATIENCE_S), limits=limits, trust_env=False)
        self._kept: dict[int, Kept] = {}
        """By conversation."""

    async def send_all(self, asks: Sequence[Ask]) -> None:
        """Every request at its time, whatever became of those before; returns when the last has ended."""
        looking = asyncio.create_task(self._check_health(), name="health")
        timing = asyncio.create_task(self._measure_lag(), name="lag")
        try:
            async with asyncio.TaskGroup() as clients:
                for ask in asks:
                    await asyncio.sleep(max(0.0, ask.at_s - self._now()))
                    clients.create_task(self.send(ask), name=f"ask-{ask.number}")
        finally:
            looking.cancel()
            timing.cancel()

    async def send(self, ask: Ask) -> Outcome:
        """One request, to the next router that takes connections."""
        self.under_way += 1
        lag_s = self._lag_s
        try:
            if ask.keeps:
                kept = self._kept.setdefault(ask.conversation, Kept())
                async with kept.turn:  # The client waits for its answer before it asks again.
                    outcome = await self._send(ask, kept)
            else:
                outcome = await self._send(ask, None)
        finally:
            self.under_way -= 1
        outcome.ended_s = self._now()
        outcome.lag_s = self._lag_s - lag_s
        self.outcomes.append(outcome)
        return outcome

    async def close(self) -> None:
        """No more requests."""
        await asyncio.gather(self._http.aclose(), *(kept.http.aclose() for kept in self._kept.values()))

    def next_router(self) -> Router:
        """As a load balancer gives it to a new connection."""
        choice = self._fit or self._routers
        return choice[next(self._turns) % len(choice)]

    async def _send(self, ask: Ask, kept: Kept | None) -> Outcome:
        until = self._now() + NOBODY_THERE_S_MAX
        while True:
            name, url = kept.router if kept is not None and kept.router is not None else self.next_router()
            unready_s = self._now() - self._unfit_since.get(name, self._now())
            outcome = Outcome(number=ask.number, router=name, sent_s=self._now(), unready_s=unready_s)
            leaving = asyncio.timeout(ask.leaves_after_s)
            try:
                async with asyncio.timeout(PATIENCE_S), leaving:
                    await self._relay(ask, url, outcome, kept)
                if kept is not None:
                    kept.router = name, url
            except httpx.ConnectError:
                if kept is not None:
                    kept.router = None
                if self._now() < until:
                    await asyncio.sleep(CHECK_S)  # Nothing was asked yet: as a load balancer does, take another one.
                    continue
                outcome.code = "no router takes connections"
            except httpx.TransportError:
                outcome.is_cut = True
            except TimeoutError:
                if leaving.expired():
                    outcome.left = True
                else:
                    outcome.code = "never ended"
            return outcome

    async def _measure_lag(self) -> None:
        while True:
            began_s = self._now()
            await asyncio.sleep(LAG_CHECK_S)
            self._lag_s += self._now() - began_s - LAG_CHECK_S

    async def _check_health(self) -> None:
        while True:
            fit = await asyncio.gather(*(self._is_ready(url) for _, url in self._routers))
            self._fit = [router for router, is_fit in zip(self._routers, fit, strict=True) if is_fit]
            unfit = {name for name, _ in set(self._routers) - set(self._fit)}
            self._unfit_since = {name: self._unfit_since.get(name, self._now()) for name in unfit}
            await asyncio.sleep(HEALTH_S)

    async def _is_ready(self, url: str) -> bool:
        try:
            return (await self._http.get(f"{url}/ready", timeout=HEALTH_S_MAX)).status_code == OK
        except httpx.TransportError:
            return False

    async def _relay(self, ask: Ask, url: str, outcome: Outcome, kept: Kept | None) -> None:
        http = self._http if kept is None else kept.http
        content = msgspec.json.encode(body_of(ask))
        headers = {"content-type": "application/json", "authorization": f"Bearer {ask.key}"}
        async with http.stream("POST", f"{url}{ask.path}", content=content, headers=headers) as answer:
            outcome.status = answer.status_code
            outcome.decode_worker = answer.headers.get("x-baton-decode-worker", "")
            outcome.reused = kept is not None and kept.reuses(answer)
            if answer.status_code == OK and ask.stream:
                await self._read_events(ask.path, answer, outcome)
            else:
                read_whole(ask.path, await answer.aread(), outcome)

    async def _read_events(self, path: str, answer: httpx.Response, outcome: Outcome) -> None:
        last_s = self._now()
        async for line in answer.aiter_lines():
            if not line.startswith(DATA):
                continue
            if outcome.first_s >= 0:
                outcome.gap_s = max(outcome.gap_s, self._now() - last_s)
            last_s = self._now()
            if outcome.first_s < 0:
                outcome.first_s = last_s
            read_event(path, line.removeprefix(DATA), outcome)
        if not outcome.dones and not outcome.code:
            outcome.is_cut = True
