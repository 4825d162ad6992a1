"""Clients: each request of a trace is sent at its time to one of the routers, and what becomes of it is recorded."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

import httpx
import msgspec

from tests.nightly.chaos.outcomes import OK, Outcome
from tests.nightly.chaos.trace import Ask

MODEL = "baton-tiny"
PATIENCE_S = 90.0
"""A client that still waits then goes home: the request has not ended in any way that is promised."""
NOBODY_THERE_S_MAX = 40.0
"""For any router to take a connection."""
CHECK_S = 0.1
HEALTH_S, HEALTH_S_MAX = 0.25, 1.0
"""A router that is not ready, or does not say so in time, gets no new connections: as load balancers have it."""
DATA = "data: "
DONE = "[DONE]"


class Traffic:
    """Sends, and keeps every outcome. ``now`` are the seconds of the run."""

    def __init__(self, routers: Sequence[tuple[str, str]], now: Callable[[], float]) -> None:
        self.outcomes: list[Outcome] = []
        self.under_way = 0
        self._routers = list(routers)
        self._fit: list[tuple[str, str]] = []
        self._turns = itertools.count()
        self._now = now
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # A router that dies takes its connections along; one that is reused just then could not be told from it.
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(PATIENCE_S), limits=limits, trust_env=False)

    async def send_all(self, asks: Sequence[Ask]) -> None:
        """Every request at its time, whatever became of those before; returns when the last has ended."""
        looking = asyncio.create_task(self._check_health(), name="health")
        try:
            async with asyncio.TaskGroup() as clients:
                for ask in asks:
                    await asyncio.sleep(max(0.0, ask.at_s - self._now()))
                    clients.create_task(self.send(ask), name=f"ask-{ask.number}")
        finally:
            looking.cancel()

    async def send(self, ask: Ask) -> Outcome:
        """One request, to the next router that takes connections."""
        self.under_way += 1
        try:
            outcome = await self._send(ask)
        finally:
            self.under_way -= 1
        outcome.ended_s = self._now()
        self.outcomes.append(outcome)
        return outcome

    async def close(self) -> None:
        """No more requests."""
        await self._http.aclose()

    async def _send(self, ask: Ask) -> Outcome:
        until = self._now() + NOBODY_THERE_S_MAX
        while True:
            choice = self._fit or self._routers
            name, url = choice[next(self._turns) % len(choice)]
            outcome = Outcome(number=ask.number, router=name, sent_s=self._now())
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._relay(ask, url, outcome)
            except httpx.ConnectError:
                if self._now() < until:
                    await asyncio.sleep(CHECK_S)  # Nothing was asked yet: as a load balancer does, take another one.
                    continue
                outcome.code = "no router takes connections"
            except httpx.TransportError:
                outcome.is_cut = True
            except TimeoutError:
                outcome.code = "never ended"
            return outcome

    async def _check_health(self) -> None:
        while True:
            fit = await asyncio.gather(*(self._is_ready(url) for _, url in self._routers))
            self._fit = [router for router, is_fit in zip(self._routers, fit, strict=True) if is_fit]
            await asyncio.sleep(HEALTH_S)

    async def _is_ready(self, url: str) -> bool:
        try:
            return (await self._http.get(f"{url}/ready", timeout=HEALTH_S_MAX)).status_code == OK
        except httpx.TransportError:
            return False

    async def _relay(self, ask: Ask, url: str, outcome: Outcome) -> None:
        body = {
            "model": MODEL,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "ignore_eos": True,
            "stream": ask.stream,
        }
        headers = {"content-type": "application/json"}
        content = msgspec.json.encode(body)
        async with self._http.stream("POST", f"{url}/v1/completions", content=content, headers=headers) as answer:
            outcome.status = answer.status_code
            outcome.decode_worker = answer.headers.get("x-baton-decode-worker", "")
            if answer.status_code == OK and ask.stream:
                await self._read_events(answer, outcome)
            else:
                _read_whole(await answer.aread(), outcome)

    async def _read_events(self, answer: httpx.Response, outcome: Outcome) -> None:
        last_s = self._now()
        async for line in answer.aiter_lines():
            if not line.startswith(DATA):
                continue
            if outcome.first_s >= 0:
                outcome.gap_s = max(outcome.gap_s, self._now() - last_s)
            last_s = self._now()
            if outcome.first_s < 0:
                outcome.first_s = last_s
            read_event(line.removeprefix(DATA), outcome)
        if not outcome.dones and not outcome.code:
            outcome.is_cut = True


def read_event(data: str, outcome: Outcome) -> None:
    """One event of a stream."""
    if outcome.dones:
        outcome.events_after_end += 1
    if data == DONE:
        outcome.dones += 1
        return
    event = msgspec.json.decode(data)
    if (error := event.get("error")) is not None:
        outcome.code = str(error["code"])
        return
    for choice in event["choices"]:
        outcome.text += choice["text"]
        if choice["finish_reason"] is not None:
            outcome.finishes.append(choice["finish_reason"])


def _read_whole(raw: bytes, outcome: Outcome) -> None:
    try:
        answer = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        outcome.code = f"no JSON: {raw[:80]!r}"
        return
    if outcome.status != OK:
        outcome.code = str(answer["error"]["code"])
        return
    for choice in answer["choices"]:
        outcome.text += choice["text"]
        outcome.finishes.append(choice["finish_reason"])
