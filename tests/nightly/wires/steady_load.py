"""Clients at a steady pace, in a process of their own, which may run in a network namespace. Each answer is compared
with the only right one.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from shared.runtime.settings import load_common
from tests.e2e.conftest import FAST
from tests.nightly.chaos.apis import read_event, read_whole
from tests.nightly.chaos.oracle import MODEL, Oracle
from tests.nightly.chaos.outcomes import OK, Outcome
from tests.nightly.chaos.traffic import DATA
from tests.support.processes import ROOT
from tests.support.system import end_with_the_tests, environment, until

PACE_HZ = 8.0
PATIENCE_S = 60.0
"""No request takes longer: its client gives up then, and the test fails."""
PROMPT_TOKENS, ANSWER_TOKENS = 300, 8
WORKERS = ("x-baton-prefill-worker", "x-baton-decode-worker")
PATH = "/v1/completions"
BUS_WAIT_S_MAX = 2.0
OUTAGE_S = 5.0
"""Longer than that."""
RECOVERY_S_MAX = 45.0
RIGHT_IN_A_ROW = 8
"""The load is fine again after so many answers to requests that were sent from now on."""


def impatient(folder: Path) -> dict[str, str]:
    """Settings of fast workers, and of routers whose requests wait for NATS for a shorter time than a test takes."""
    policy = folder / "policy.toml"
    policy.write_text(f"bus_wait_s_max = {BUS_WAIT_S_MAX}")
    return {**FAST, "ROUTER_FAILURE_POLICY": str(policy)}


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request. Seconds are those of the monotonic clock, which all processes of a machine share."""

    number: int
    sent_s: float
    ended_s: float
    status: int
    """0: no answer came."""
    code: str = ""
    """Of the error, also of one at the end of a stream."""
    message: str = ""
    workers: tuple[str, ...] = ()
    """Those that computed the prompt, if another one did, and the answer."""
    is_right: bool = False


@dataclass
class Fault:
    """While it lasts, requests may fail with these codes."""

    codes: frozenset[str]
    began_s: float
    ended_s: float = float("inf")

    def excuses(self, told: Told) -> bool:
        return told.code in self.codes and told.sent_s <= self.ended_s and told.ended_s >= self.began_s


class Load:
    """The running process, as the test sees it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        self._faults: list[Fault] = []

    def told(self) -> list[Told]:
        """Of all requests that have ended."""
        lines = self._log.read_bytes().splitlines(keepends=True)
        return [msgspec.json.decode(line, type=Told) for line in lines if line.endswith(b"\n")]

    def run_well(self, s_max: float = RECOVERY_S_MAX) -> None:
        """Until some requests in a row, sent from now on, are answered rightly."""
        now = time.monotonic()

        def is_well() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            last = [told for told in self.told() if told.sent_s > now][-RIGHT_IN_A_ROW:]
            return len(last) == RIGHT_IN_A_ROW and all(told.is_right for told in last)

        until(is_well, f"all requests are answered: {self.told()[-RIGHT_IN_A_ROW:]}", s_max)

    @contextmanager
    def fault(self, *codes: str) -> Iterator[None]:
        """Requests may fail with these codes until the block has ended and requests are answered again."""
        fault = Fault(frozenset(codes), time.monotonic())
        self._faults.append(fault)
        yield
        self.run_well()
        fault.ended_s = time.monotonic()

    def end(self) -> list[Told]:
        """Ends it after the last answer. Asserts that each request was answered rightly, but for permitted errors."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(PATIENCE_S) == 0, self._log.read_text()
        told = self.told()
        assert sorted(each.number for each in told) == list(range(len(told)))
        wrong = [each for each in told if not each.is_right and not any(f.excuses(each) for f in self._faults)]
        assert not wrong, "\n".join([f"{len(wrong)} of {len(told)} requests:", *map(str, wrong)])
        return told


@contextmanager
def steady_load(
    folder: Path, url: str, *, key: str = "", mode: str = "auto", within: Sequence[str] = ()
) -> Iterator[Load]:
    """Requests until the block ends; ``within`` is a command that runs another one, such as ``ip netns exec``."""
    log = folder / "load.jsonl"
    arguments = [*within, sys.executable, "-m", "tests.nightly.wires.steady_load", url, mode, key]
    with log.open("wb") as out, (folder / "load.log").open("wb") as errors:
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env=environment(),
            stdout=out,
            stderr=errors,
            preexec_fn=end_with_the_tests,  # noqa: PLW1509  # one system call between fork and exec
        )
    try:
        yield Load(process, log)
    finally:
        process.kill()
        process.wait()


def _body(prompt: list[int], *, stream: bool) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": stream}


async def _ask(http: httpx.AsyncClient, oracle: Oracle, number: int) -> Told:
    chance = random.Random(number)
    prompt = oracle.sayable([10 + chance.randrange(2000) for _ in range(PROMPT_TOKENS)])
    outcome = Outcome(number=number, router="", sent_s=time.monotonic())
    is_stream, workers = bool(number % 2), tuple[str, ...]()
    try:
        async with http.stream("POST", PATH, json=_body(prompt, stream=is_stream)) as answer:
            outcome.status = answer.status_code
            workers = tuple(answer.headers[name] for name in WORKERS if name in answer.headers)
            if is_stream and answer.status_code == OK:
                async for line in answer.aiter_lines():
                    if line.startswith(DATA):
                        read_event(PATH, line.removeprefix(DATA), outcome)
            else:
                read_whole(PATH, await answer.aread(), outcome)
    except httpx.TransportError as error:
        outcome.code, outcome.message = type(error).__name__, str(error)
    right = oracle.text(oracle.answer(prompt, ANSWER_TOKENS))
    is_whole = outcome.dones == int(is_stream) and not outcome.events_after_end and outcome.finishes == ["length"]
    return Told(
        number=number,
        sent_s=outcome.sent_s,
        ended_s=time.monotonic(),
        status=outcome.status,
        code=outcome.code,
        message=outcome.message or ("" if outcome.text == right else f"{outcome.text!r} is not {right!r}"),
        workers=workers,
        is_right=outcome.is_answered and is_whole and outcome.text == right,
    )


async def _main(url: str, mode: str, key: str) -> None:
    oracle = Oracle(Path(load_common().cache_dir))
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)

    async def ask(number: int) -> None:
        told = await _ask(http, oracle, number)
        sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
        sys.stdout.buffer.flush()

    headers = {"x-baton-mode": mode, **({"authorization": f"Bearer {key}"} if key else {})}
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(
            base_url=url, headers=headers, timeout=httpx.Timeout(PATIENCE_S), limits=limits, trust_env=False
        ) as http,
        asyncio.TaskGroup() as tasks,
    ):
        begun_s, number = time.monotonic(), 0
        while not stopping.is_set():
            tasks.create_task(ask(number), name=f"request {number}")
            number += 1
            try:
                await asyncio.wait_for(stopping.wait(), max(0.0, begun_s + number / PACE_HZ - time.monotonic()))
            except TimeoutError:
                continue


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
