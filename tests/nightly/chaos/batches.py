"""Clients of batches: each uploads its lines, follows the batch to its end and fetches the results, whatever breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec

from tests.nightly.chaos.apis import body_of, read_whole
from tests.nightly.chaos.keys import STEADY
from tests.nightly.chaos.outcomes import LOST, NEVER_ENDED, OK, BatchOutcome, LineOutcome, Outcome
from tests.nightly.chaos.trace import Ask, Batch
from tests.nightly.chaos.traffic import Traffic

FILES, BATCHES = "/v1/files", "/v1/batches"
CALL_S_MAX = 10.0
AGAIN_S = 0.5
BATCH_S_MAX = 150.0
"""From a batch's upload to its results: a killed router's batch waits 15 s for another one, each time."""
ENDED = ("completed", "failed", "expired", "cancelled")
NOT_FOUND = 404


class Gone(Exception):
    """A router says that it does not know what a router has accepted."""


class BatchClients:
    """``now`` are the seconds of the run."""

    def __init__(self, traffic: Traffic, now: Callable[[], float]) -> None:
        self.outcomes: list[BatchOutcome] = []
        self._traffic = traffic
        self._now = now
        headers = {"authorization": f"Bearer {STEADY}"}
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(CALL_S_MAX), headers=headers, trust_env=False)

    async def send_all(self, batches: Sequence[Batch]) -> None:
        """Every batch at its time; returns when the last has ended."""
        async with asyncio.TaskGroup() as clients:
            for batch in batches:
                clients.create_task(self._follow_at_its_time(batch), name=f"batch-{batch.number}")

    async def close(self) -> None:
        await self._http.aclose()

    async def _follow_at_its_time(self, batch: Batch) -> None:
        await asyncio.sleep(max(0.0, batch.at_s - self._now()))
        outcome = BatchOutcome(number=batch.number, sent_s=self._now())
        try:
            async with asyncio.timeout(BATCH_S_MAX):
                await self._follow(batch, outcome)
        except Gone:
            outcome.status = LOST
        except TimeoutError:
            outcome.status = NEVER_ENDED
        outcome.ended_s = self._now()
        self.outcomes.append(outcome)

    async def _follow(self, batch: Batch, outcome: BatchOutcome) -> None:
        content = b"\n".join(map(_line, batch.lines))
        form = {"files": {"file": ("lines.jsonl", content)}, "data": {"purpose": "batch"}}
        file = await self._call("POST", FILES, **form)
        order = {"input_file_id": file["id"], "endpoint": batch.lines[0].path, "completion_window": "24h"}
        made = await self._call("POST", BATCHES, json=order)
        while made["status"] not in ENDED:
            await asyncio.sleep(AGAIN_S)
            made = await self._call("GET", f"{BATCHES}/{made['id']}")
        for name in ("output_file_id", "error_file_id"):
            if found := made.get(name):
                results = await self._answer("GET", f"{FILES}/{found}/content")
                outcome.lines += [_result(line) for line in results.content.splitlines()]
        outcome.status = made["status"]

    async def _call(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        called: dict[str, Any] = msgspec.json.decode((await self._answer(method, path, **given)).content)
        return called

    async def _answer(self, method: str, path: str, **given: Any) -> httpx.Response:
        """The answer of the first router that has one."""
        while True:
            _, url = self._traffic.next_router()
            try:
                answer = await self._http.request(method, f"{url}{path}", **given)
                if answer.status_code == OK:
                    return answer
                if answer.status_code == NOT_FOUND:
                    raise Gone
            except httpx.TransportError:
                pass  # This client tries again, until its time is over.
            await asyncio.sleep(AGAIN_S)


def _line(ask: Ask) -> bytes:
    return msgspec.json.encode(
        {"custom_id": str(ask.number), "method": "POST", "url": ask.path, "body": {**body_of(ask), "stream": False}}
    )


def _result(line: bytes) -> LineOutcome:
    result = msgspec.json.decode(line)
    number, error, response = int(result["custom_id"]), result.get("error"), result.get("response")
    if response is None:
        return LineOutcome(number=number, code=str(error["code"]))
    read = Outcome(number=number, router="", sent_s=0.0, status=response["status_code"])
    read_whole("/v1/completions", msgspec.json.encode(response["body"]), read)
    return LineOutcome(number=number, code=read.code, text=read.text)
