"""Two workers with real engines and a NATS server, which a test may freeze, kill and restart.

The engines exchange over TCP, as between machines. A TCP read needs the holder's process to run, so a test freezes the
holder to act in the middle of a read.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from shared.contracts.inference import Frame, FrameKind, LegKind, LegReport
from shared.contracts.kv_exchange import KvOffer, KvTransferReport
from shared.contracts.workers import WorkerPhase
from tests.support.drafters import ACCEPTED_MIN, Drafting
from tests.support.kv_driver import BLOCK, MODEL, Driver, driving
from tests.support.kv_tap import Tap
from tests.support.model_families import FAMILIES, Family, make_model
from tests.support.nats_server import NatsServer
from tests.support.network_hosts import ADDRESSES, DAY_AHEAD, MEETING, Host, two_hosts, typing_on
from tests.support.processes import freeze
from tests.support.prompts import random_prompt
from tests.support.pulled_legs import PulledLeg
from tests.support.worker_processes import WorkerProcess, start_worker, wait_ready

PREFILL, DECODE = "p1", "d1"
STAGES = "two-stages"
"""Instead of a family: the prefill engine has two pipeline stages."""
DRAFTS = tuple(ACCEPTED_MIN)
"""Instead of a family: both engines draft so, and the draft's KV is handed over as well."""
RANKS = {"prefill-rank": PREFILL, "decode-rank": DECODE}
"""Instead of a family: the worker of an engine with experts that is rank 1 of a data parallel group of two."""
HOSTS = "two-hosts"
"""Instead of a family: the decode engine has a pipeline stage on a second host, whose clock is a day ahead."""
PLAIN = ("llama", "granite-4", "deepseek-v2", STAGES)
"""Beside the windows of Gemma 3: layers that are all alike, states, MLA, and stages."""
KINDS = (*PLAIN, *DRAFTS, *RANKS, HOSTS)
LEASE_S = 6.0
EXPIRED_S_MAX = LEASE_S + 30.0
CHUNK_TOKENS = 256
"""Prompt tokens that the prefill engine computes in one step; of a model with a state a block's, as a CPU needs it."""
LEN_MAX = 2000
"""Tokens of a request at most."""
HALF_TOKENS = 950
"""Two prompts of this length leave the decode engine a block: see ``decode_memory``. Their tails are less than a block:
beside an answer, an engine that computes a block's tokens in a step has no room for a whole one.
"""
HUNGRY_TOKENS, VICTIM_TOKENS = 600, 150
"""Tokens of the answers of two that do not fit. The second one is preempted while it answers."""
WINDOW_STEP_TOKENS = 32
"""Tokens that a decode engine with windows computes in a step, so that a request fits where two do not."""
STEPS_AT_ONCE = 2
"""Steps under way: vLLM schedules one while another is computed."""
START_S_MAX = 480.0
LEG_S_MAX = 40.0
"""Maximum duration of any leg in these tests, under any fault."""
ENVIRON = {"UCX_TLS": "tcp,self"}


@dataclass(frozen=True)
class Model:
    """The model of both engines."""

    settings: Mapping[str, str]
    """Of a worker that serves it."""
    family: Family
    prefill_settings: Mapping[str, str] = field(default_factory=dict)
    """Further ones of the prefill worker, such as ranks."""
    decode_settings: Mapping[str, str] = field(default_factory=dict)
    """Further ones of the decode worker."""
    engine_args: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables of both engines."""
    rank: str = ""
    """The worker, if any, that is rank 1 of a data parallel group."""
    spread: str = ""
    """The worker, if any, whose engine is on two hosts."""
    accepted_min: float = 0.0
    """Share of the drafted tokens that the decode engine accepts, if its draft has the KV of the whole prompt."""

    @property
    def block(self) -> int:
        """Tokens of a KV block."""
        return self.family.block


def family_model(family: str, folder: Path, **options: Any) -> Model:
    """A tiny model of the family, made below ``folder``. Of ``STAGES`` it is a Gemma 3, of ``DRAFTS`` and
    ``HOSTS`` a Llama or a MiMo, of ``RANKS`` a Qwen 3 with experts.
    """
    if family == STAGES:
        stages = {"pipeline_parallel_size": "2", "cpu_cores": "0,1"}
        return replace(family_model("gemma-3", folder), prefill_settings=stages)
    if family in DRAFTS:
        drafting = Drafting.by(family, folder)
        settings = {"model": str(drafting.model), "served_model_name": MODEL}
        return Model(
            settings, FAMILIES["llama"], engine_args=drafting.engine_args, accepted_min=ACCEPTED_MIN[family], **options
        )
    if family == HOSTS:
        return replace(family_model("llama", folder), spread=DECODE)
    if family in RANKS:
        return replace(family_model("qwen3-moe", folder), rank=RANKS[family])
    settings = {"model": str(make_model(family, folder)), "served_model_name": MODEL}
    return Model(settings, FAMILIES[family], **options)


def decode_memory(family: Family) -> str:
    """The decode engine's arguments. Its memory holds two requests of ``HALF_TOKENS`` and a block more, or the longest
    request that it must be able to hold.
    """
    two = 2 * family.blocks(HALF_TOKENS + 1) + 1
    longest = family.blocks(LEN_MAX, STEPS_AT_ONCE * WINDOW_STEP_TOKENS)
    memory = f"--num-gpu-blocks-override {1 + max(two, longest)}"  # VLLM keeps one for itself.
    step = f"--max-num-batched-tokens {WINDOW_STEP_TOKENS} --max-num-seqs {WINDOW_STEP_TOKENS}"
    return f"{memory} {step}" if family.windows else memory


@contextmanager
def frozen_engine(worker: WorkerProcess) -> Iterator[psutil.Process]:
    """Suspend a worker's engine, with its ranks, until the ``with`` block ends or the engine is killed."""
    core = worker.engine_core()
    engine = [core, *core.children(recursive=True)]
    try:
        for process in engine:
            freeze(process.pid)
        yield core
    finally:
        for process in engine:
            with suppress(psutil.NoSuchProcess):
                process.resume()


@dataclass
class Pair:
    nats: NatsServer
    folder: Path
    model: Model
    hosts: tuple[Host, Host] | None = None
    """If not this machine."""
    workers: dict[str, tuple[WorkerProcess, ...]] = field(default_factory=dict)
    """Prefill and decode, each with the processes that end when it ends: the other rank of its group, or the rest of its
    engine on another host.
    """
    lends: bool = True
    """Whether the engines lend blocks by hash."""

    @property
    def prefill(self) -> WorkerProcess:
        return self.workers[PREFILL][0]

    @property
    def decode(self) -> WorkerProcess:
        return self.workers[DECODE][0]

    def start(self, name: str) -> None:
        """Start a worker, with the processes that belong to it."""
        self.end(name)
        settings = settings_of(name, self.model)
        parts = [(name, settings, "")]
        if name == self.model.rank:
            group = {**settings, "data_parallel_size": "2", "data_parallel_group": f"{self.folder} {name}"}
            parts = [
                (f"{name}{end}", {**group, "data_parallel_rank": rank}, "") for end, rank in (("", "1"), ("-0", "0"))
            ]
        elif name == self.model.spread:
            engine = {**settings, "nodes": "2", "pipeline_parallel_size": "2", "head_address": MEETING}
            parts = [
                (f"{name}{end}", {**engine, "node": node}, clock)
                for end, node, clock in (("", "0", ""), ("-1", "1", DAY_AHEAD))
            ]
        self.workers[name] = tuple(
            start_worker(
                self.nats.url,
                worker_id,
                self.folder,
                environ={**ENVIRON, **self.model.environ},
                through=self.hosts[int(own.get("node", 0))].arguments(clock) if self.hosts else (),
                **own,
            )
            for worker_id, own, clock in parts
        )

    def end(self, name: str) -> None:
        for worker in self.workers.get(name, ()):
            worker.kill()

    @contextmanager
    def frozen_prefill_engine(self) -> Iterator[psutil.Process]:
        """Suspend the prefill engine until the ``with`` block ends or the engine is killed."""
        with frozen_engine(self.prefill) as core:
            yield core

    async def restart_prefill(self, tap: Tap) -> None:
        """Kill the prefill worker, start it again and wait until it is ready."""
        old = tap.loads[PREFILL].epoch
        self.start(PREFILL)

        def is_back() -> bool:
            load = tap.loads[PREFILL]
            return load.epoch > old and load.phase is WorkerPhase.READY

        await tap.until(is_back, "the prefill worker is back", START_S_MAX)


def settings_of(name: str, model: Model) -> dict[str, str]:
    """Settings of the prefill or the decode worker."""
    common = {"kv_lease_s": str(LEASE_S), "max_model_len": str(LEN_MAX), **model.settings}
    if name == PREFILL:
        step = f"--max-num-batched-tokens {model.block if model.family.states else CHUNK_TOKENS}"
        own = {"role": "prefill", "cpu_cores": "0", **model.prefill_settings}
        return {**common, **own, "engine_args": f"{step} {model.engine_args}"}
    own = {"role": "decode", "cpu_cores": "1", **model.decode_settings}
    return {**common, **own, "engine_args": f"{decode_memory(model.family)} {model.engine_args}"}


@contextmanager
def kv_pair(folder: Path, model: Model) -> Iterator[Pair]:
    """Starts two engines, so share one pair between tests."""
    with ExitStack() as stack:
        hosts = None
        if model.spread:
            hosts = stack.enter_context(two_hosts(folder, ENVIRON))
            stack.enter_context(typing_on(hosts[0]))
        address = {"host": ADDRESSES[0]} if hosts else {}
        pair = Pair(stack.enter_context(NatsServer(folder, has_buckets=True, **address)), folder, model, hosts)
        for name in (PREFILL, DECODE):
            stack.callback(pair.end, name)
            pair.start(name)
        asyncio.run(wait_ready(pair.nats.url, [pair.prefill, pair.decode]))
        record = pair.prefill.record
        assert record is not None
        assert record.hashing.block_size == model.block
        pair.lends = record.prefix_caching
        yield pair


@asynccontextmanager
async def driver_of(pair: Pair) -> AsyncIterator[Driver]:
    """A driver for one test. Restarts a worker that an earlier test killed, so that failures do not spread."""
    for name in (PREFILL, DECODE):
        if pair.workers[name][0].process.poll() is not None:
            pair.start(name)
    async with Tap(pair.nats.url) as tap, driving(tap) as driver:

        def ready() -> bool:
            phases = [tap.loads[name].phase for name in (PREFILL, DECODE) if name in tap.loads]
            return phases == [WorkerPhase.READY] * 2

        await tap.until(ready, "both workers are ready", START_S_MAX)
        yield driver


def pair_of(*families: Any) -> Callable[..., Iterator[Pair]]:
    """The fixture of a test file: its tests run with a pair for each of these (see ``family_model``)."""

    @pytest.fixture(scope="module", params=families)
    def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        folder = tmp_path_factory.mktemp("pair")
        with kv_pair(folder, family_model(request.param, folder)) as pair:
            yield pair

    return pair


@pytest.fixture
async def settled_driver(pair: Pair) -> AsyncIterator[Driver]:
    """Each test leaves nothing pinned, read or served. A draft knew the prompts, whatever became of their KV.

    Not those that were computed beside other answers, in parts of a few tokens: vLLM's runner for CPUs takes a prompt's
    last token for the one after each part, so EAGLE's and MTP's KV is wrong there.
    """
    async with driver_of(pair) as driver:
        yield driver
        await driver.tap.until_settled(PREFILL, DECODE, s_max=EXPIRED_S_MAX)
        for leg in driver.tap.legs.values():
            kv = leg.report.kv if leg.report is not None else None
            if kv is not None and kv.drafted_tokens and not kv.recompute_slowed_s:
                assert kv.accepted_tokens >= pair.model.accepted_min * kv.drafted_tokens, (leg.start.kind, kv)


async def until_first_token(leg: PulledLeg) -> list[Frame]:
    """The leg's frames up to those with the first token."""
    frames: list[Frame] = []
    while not any(frame.data for frame in frames):
        frames += await leg.frames()
    return frames


async def remaining_frames(leg: PulledLeg, frames: Sequence[Frame] = ()) -> list[Frame]:
    """All frames of a leg, of which ``frames`` are read already. Raises LegFailed."""
    read = list(frames)
    async with asyncio.timeout(LEG_S_MAX):
        while not read or read[-1].kind is not FrameKind.END:
            read += await leg.frames()
    return read


async def until_decode_reads(driver: Driver, legs: int) -> None:
    """Wait until the decode worker serves ``legs`` legs and reads. An engine that only waits for a read reports nothing;
    its reply to a request for a lease brings its state.
    """
    tap = driver.tap
    await tap.until(lambda: tap.loads[DECODE].legs == legs, f"decode serves {legs}")
    async with asyncio.timeout(LEG_S_MAX):
        while not tap.exchange_state(DECODE).reads:
            await driver.lease(DECODE, random_prompt("asked for its state", BLOCK), hold_s=1.0)
            del tap.loads[DECODE]
            await tap.until(lambda: DECODE in tap.loads, "decode reports")


def tokens_of(frames: Sequence[Frame]) -> list[int]:
    return [token for frame in frames for token in frame.token_ids]


def report_of(frames: Sequence[Frame]) -> tuple[LegReport, KvTransferReport]:
    """The report at the leg's end and its transfer report."""
    report = frames[-1].report
    assert report is not None
    assert report.kv is not None, "no transfer report"
    return report, report.kv


async def start_two_that_do_not_fit(
    decode: WorkerProcess, driver: Driver, first: list[int], second: list[int], **options: Any
) -> tuple[PulledLeg, PulledLeg]:
    """Start two decode legs; when they have grown by a block or two, the second one is preempted. The engine gets both
    at once: if the first had grown already, the second would wait instead.
    """
    offers = [await driver.offered(PREFILL, prompt) for prompt in (first, second)]
    with frozen_engine(decode):
        legs = [
            await driver.start(
                DECODE,
                LegKind.DECODE,
                prompt,
                kv_transfer=packed(offer),
                kv_sources=[driver.source(PREFILL)],
                fields={"stream": True, "max_tokens": tokens},
                **more,
            )
            for prompt, offer, tokens, more in (
                (first, offers[0], HUNGRY_TOKENS, {}),
                (second, offers[1], VICTIM_TOKENS, options),
            )
        ]
        tokens = len(first) + len(second)
        await driver.tap.until(lambda: driver.tap.loads[DECODE].waiting_tokens >= tokens, "both are at the engine")
    return legs[0], legs[1]


async def start_following(driver: Driver, prompt: list[int]) -> PulledLeg:
    """Start a prefill leg and a decode leg that follows it, with grants over the bus, as between machines; returns the
    decode leg when its first blocks are granted.
    """
    known, asked = len(driver.tap.grants), len(driver.tap.leases)
    await driver.start(PREFILL, LegKind.PREFILL, prompt, kv_offer=False)
    leg = await driver.start(DECODE, LegKind.DECODE, prompt, kv_sources=[driver.source(PREFILL, follow=True)])
    ask = (await driver.tap.until(lambda: driver.tap.leases[asked:], "decode asks"))[0]
    Path(ask.reply_to).unlink(missing_ok=True)
    granted = lambda: [grant for grant in driver.tap.grants[known:] if grant.groups]  # noqa: E731
    await driver.tap.until(granted, "the first chunk is granted")
    return leg


def packed(offer: KvOffer) -> bytes:
    """The offer as encoded in StartLeg."""
    return msgspec.msgpack.encode(offer)


def kill(core: psutil.Process) -> None:
    """Kill an engine with its ranks, also when it is suspended."""
    for process in (core, *core.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
            process.send_signal(signal.SIGCONT)
