"""The KV self-test: one worker computes a short prompt, another reads its KV and must have the same bytes, and find the
same tokens as likely to be next.

Bytes are compared by digests. They show any block, layer or head that is in the wrong place or was changed. What they
cannot show is that both engines mean the same by the bytes; log probabilities do. Generated tokens are not compared:
where the most likely ones are nearly equally likely, other kernels and batch shapes change the order.

A worker tests itself with one partner of each kind, in both directions. If the test fails with one partner, the worker
tries another, because the partner may be the faulty one. An unresponsive partner does not fail the test.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from math import lcm
from typing import Any

import msgspec

from connector.messages import LeaseDigested, ReadMeasured
from services.worker.engines.port import CURRENT_LEG, Engine, Identity, Leg, LegInput, LegResult
from services.worker.legs.asgi_call import ask_app
from services.worker.lifecycle.registration import Registration
from shared.bus.port import AskRefused, Bus, BusError, Envelope
from shared.contracts.channels import RUN_SELF_TEST, SELF_TEST_PROMPT
from shared.contracts.failures import Failure, Reason
from shared.contracts.fleet_orders import (
    LIKELY_TOKENS_MAX,
    AskSelfTestPrompt,
    RunSelfTest,
    SelfTestPrompt,
    SelfTestResult,
)
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    DIGEST_BYTES,
    DIGEST_VERSION,
    KV_GROUPS_MAX,
    KvDigest,
    KvSource,
    KvTransferReport,
    LegOrder,
    NoGrant,
    new_lease_id,
)
from shared.contracts.workers import (
    KV_SPEED_MAX,
    KV_SPEEDS_MAX,
    HashScheme,
    KvReadSpeed,
    Role,
    WorkerPhase,
    WorkerRecord,
)
from shared.runtime.clock import Clock
from shared.telemetry.tracing import NOT_TRACED
from shared.text.formats import bytes_per_second

FULL_BLOCKS = 2
FULL_TOKENS_MAX = 2048
"""Where blocks are so long that ``FULL_BLOCKS`` have more tokens, the prompt has one, or ends within one."""
TAIL_TOKENS = 1
"""Tokens that the reader computes itself. After a longer tail a model with a recurrent state may answer the same with a
wrong state or none: of four families, two did after 12 and 44 tokens.
"""
ANSWER_TOKENS = 1
LOGPROB_DIFFERENCE_MAX = 0.5
"""Largest difference of a token's log probability with right KV: what kernels and batch shapes may make in bfloat16.

Measured between two engines on CPUs, twelve prompts each (float32 and bfloat16, a Llama and a gpt-oss with nearly equal
logits). Right KV: 0.000, with six prompts in a step below 0.005. A layer of zeros: 1.3 to 5.8 with usual logits, 0.03
to 0.54 with nearly equal ones. Two swapped blocks: 0.000001 to 0.4, since attention without a window does not depend on
the order of keys, which have their positions in them. So this finds gross faults only, and digests find the others.
"""
ATTEMPTS_MAX = 3
"""Attempts with one kind of partner in one round."""
NUMBERS_MAX = 1000
"""The prompt is made of numbers below this."""
PAUSE_S = 1.0
"""Pause after the first failed round; doubled after each further one."""
PAUSE_S_MAX = 30.0


class PartnerKind(StrEnum):
    """Whether a partner computes prompts or generates answers."""

    PREFILL = "prefill"
    DECODE = "decode"


KIND_OF: Mapping[Role, PartnerKind] = {
    Role.PREFILL: PartnerKind.PREFILL,
    Role.DECODE: PartnerKind.DECODE,
    Role.BOTH: PartnerKind.DECODE,
}
"""A store is no partner: it has no engine that could generate."""
NEW_PARTNERS: Mapping[Role, frozenset[PartnerKind]] = {
    Role.PREFILL: frozenset({PartnerKind.DECODE}),
    Role.DECODE: frozenset({PartnerKind.PREFILL}),
    Role.BOTH: frozenset(PartnerKind),
}
"""Kinds of partner that a worker exchanges KV with after a change to this role. A store never changes its role."""


class Outcome(StrEnum):
    """Outcome of one attempt, or of all attempts with one kind of partner, from worst to best."""

    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    """The partner was busy or has ended."""
    PASSED = "passed"


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a self-test in one direction, or of the worst direction."""

    outcome: Outcome
    failure: str = ""


PASSED = Result(Outcome.PASSED)


@dataclass(frozen=True, slots=True)
class Attempt:
    partner: WorkerId
    result: Result


def partners(me: WorkerId, records: Iterable[WorkerRecord], kind: PartnerKind, *, lends: bool) -> list[WorkerRecord]:
    """Possible partners of this kind, the preferred ones first: those that lend, then those that are READY. Among
    equals each worker has an order of its own, so that many that start together do not all choose the same partner.

    An engine without prefix caching reads KV and cannot lend it by hash. ``lends`` says whether this worker can: two
    workers that both cannot have nothing to test.
    """
    able = [record for record in records if KIND_OF.get(record.role) is kind and (lends or record.prefix_caching)]
    serving = [record for record in able if record.phase in {WorkerPhase.READY, WorkerPhase.PROBING}]
    return sorted(
        serving, key=lambda it: (not it.prefix_caching, it.phase is not WorkerPhase.READY, _affinity(me, it.worker_id))
    )


def _affinity(me: WorkerId, other: WorkerId) -> bytes:
    return blake2b(f"{me} {other}".encode(), digest_size=8).digest()


def next_partner(
    able: Sequence[WorkerRecord], attempts: Sequence[Attempt], trying: Collection[WorkerId] = ()
) -> WorkerRecord | None:
    """The partner to try now; None: no further one. An inconclusive partner is not tried again in this round, nor is
    one of ``trying``, whose tests have not ended.
    """
    if len(attempts) + len(trying) >= ATTEMPTS_MAX or any(
        attempt.result.outcome is Outcome.PASSED for attempt in attempts
    ):
        return None
    silent = {attempt.partner for attempt in attempts if attempt.result.outcome is Outcome.INCONCLUSIVE}
    tried = [attempt.partner for attempt in attempts]
    waiting = [record for record in able if record.worker_id not in silent and record.worker_id not in trying]
    return min(waiting, key=lambda record: tried.count(record.worker_id), default=None)


def outcome_of(attempts: Sequence[Attempt]) -> Outcome:
    """The outcome of all attempts with one kind of partner: one pass is enough, no attempt at all is inconclusive."""
    outcomes = {attempt.result.outcome for attempt in attempts}
    return next((it for it in (Outcome.PASSED, Outcome.FAILED) if it in outcomes), Outcome.INCONCLUSIVE)


def as_text(results: Mapping[PartnerKind, Sequence[Attempt]]) -> str:
    """For the worker's note: why each kind of partner that was tried did not pass. Empty if all passed."""
    if not any(results.values()):
        return "no partner for a KV self-test at its start"
    parts = []
    for attempts in results.values():
        outcome = outcome_of(attempts)
        last = next((it for it in reversed(attempts) if it.result.outcome is outcome), None)
        if last is not None and outcome is not Outcome.PASSED:
            parts.append(f"KV self-test with {last.partner}: {last.result.failure}")
    return "; ".join(parts)


def worst(results: Iterable[Result]) -> Result:
    """The worst of all directions; without any direction there is nothing that could fail."""
    return min(results, key=lambda result: list(Outcome).index(result.outcome), default=PASSED)


def pause_s(rounds: int) -> float:
    """Pause after this number of failed rounds."""
    return float(min(PAUSE_S_MAX, PAUSE_S * 2.0 ** min(rounds - 1, 16)))


def prompt_tokens(hashing: HashScheme, max_model_len: int) -> int:
    """Length of the prompt; 0: the model's context is too small for a self-test."""
    whole = lcm(hashing.align, hashing.stride * hashing.block_size or hashing.align)
    most = min(FULL_TOKENS_MAX, max_model_len - TAIL_TOKENS - ANSWER_TOKENS)
    lengths = (*(blocks * whole for blocks in range(FULL_BLOCKS, 0, -1)), hashing.align)
    return next((length + TAIL_TOKENS for length in lengths if length <= most), 0)


def check_report(report: KvTransferReport | None, full_tokens: int) -> Result:
    """Whether the reader's engine fetched all that can be fetched."""
    if report is None:
        return Result(Outcome.FAILED, "the engine makes no KV transfer report")
    if report.fetched_tokens >= full_tokens:
        return PASSED
    why = next((read.failure for read in report.reads if read.failure), "")
    if not why:
        why = "they were cached here" if report.local_tokens else "the engine is not connected to it, as its log says"
    # A holder in a long step grants too late for a request that waits: that does not mean that reading is broken.
    outcome = Outcome.INCONCLUSIVE if why == NoGrant.UNREACHABLE else Outcome.FAILED
    return Result(outcome, f"{report.fetched_tokens} of {full_tokens} tokens' KV came: {why}")


@dataclass(frozen=True, slots=True)
class Computed:
    """What an engine has computed of a self-test prompt."""

    digests: Sequence[KvDigest]
    """Digests of its full blocks, one for each KV cache group."""
    logprobs: Mapping[int, float]
    """Log probabilities of the next token, of some tokens; none if the engine gives none."""


def why_unsound(prompt: SelfTestPrompt) -> str:
    """Why another worker's message is not usable; empty if it is."""
    if len(prompt.likely) != len(prompt.logprobs) or len(prompt.likely) > LIKELY_TOKENS_MAX:
        return f"{len(prompt.likely)} tokens with {len(prompt.logprobs)} log probabilities"
    if len(prompt.digests) > KV_GROUPS_MAX or any(len(one.digest) != DIGEST_BYTES for one in prompt.digests):
        return f"{len(prompt.digests)} digests that are too many or of another length"
    return ""


def compare(holder: Computed, reader: Computed) -> Result:
    """Whether the reader has the holder's KV and computes with it what the holder computes."""
    results = [_compare_digests(holder.digests, reader.digests), _compare_logprobs(holder.logprobs, reader.logprobs)]
    compared = [result for result in results if result is not None]
    return worst(compared) if compared else Result(Outcome.INCONCLUSIVE, "nothing that both engines give is comparable")


def _compare_digests(held: Sequence[KvDigest], read: Sequence[KvDigest]) -> Result | None:
    """None if no digest of the holder can be compared."""
    own = {one.group: one for one in read}
    comparable = [one for one in held if one.version == DIGEST_VERSION and one.is_uniform]
    for one in comparable:
        if own.get(one.group) != one:
            text = f"the KV of group {one.group} that was read has other bytes than at its holder"
            return Result(Outcome.FAILED, text)
    return PASSED if comparable else None


def _compare_logprobs(held: Mapping[int, float], read: Mapping[int, float]) -> Result | None:
    """None if no log probability can be compared."""
    if not held or not read:
        return None
    difference = logprob_difference(held, read)
    if difference <= LOGPROB_DIFFERENCE_MAX:
        return PASSED
    text = f"with the KV that was read log probabilities differ by up to {difference:.3f} from those at its holder"
    return Result(Outcome.FAILED, text)


def logprob_difference(held: Mapping[int, float], read: Mapping[int, float]) -> float:
    """The largest difference of a token's log probability; infinite if one is missing or no number."""
    differences = [abs(read.get(token, -math.inf) - logprob) for token, logprob in held.items()]
    return max((math.inf if math.isnan(one) else one for one in differences), default=0.0)


log = logging.getLogger("baton.worker")

PATH = "/v1/completions"
OK, BAD_REQUEST = 200, 400
NAME_OF_ID = "token_id:"
"""The servers name a token by this and its id where texts would be ambiguous."""
PROMPTS_AT_ONCE_MAX = 8
"""Prompts computed for other workers at a time; further requests are refused."""
PROMPT_S_MAX = 5.0
"""Time limit for a partner to compute its prompt; a slower one counts as too busy."""
MEASURE_S_MAX = 5.0
"""Time limit for a measurement and those before it. The engine needs less, unless it is in a long step."""
WAITING_MAX = 4
"""Measurements that may wait for the one under way; further ones are left out."""

CONNECT_S_MAX = 15.0
"""Time limit for an engine to be connected to a partner. A lease must not end while it connects, so this comes first.
"""
READ_S_MAX = 10.0
"""Time limit for this engine to read a prompt's KV and generate."""
RUN_S_MAX = CONNECT_S_MAX + PROMPT_S_MAX + READ_S_MAX + MEASURE_S_MAX
"""Time limit for a partner to connect, ask for this worker's prompt, read it and measure how fast it reads."""
ERROR_CHARS_MAX = 300

Measure = Callable[[WorkerId, Epoch], Awaitable[None]]
"""Measures how fast this worker reads another one's KV, within MEASURE_S_MAX. Never raises."""
Settled = Callable[[WorkerId, float], Awaitable[None]]
"""Waits, for so many seconds at most, until this worker's engine has connected to another one, or cannot for now."""
Digest = Callable[[str], Awaitable[LeaseDigested]]
"""Ends an offer of this worker's engine, and returns digests of its blocks."""


@dataclass(frozen=True, slots=True)
class Read:
    """What came of reading a partner's KV."""

    result: Result
    leg: LegResult | None = None
    logprob_difference: float = 0.0


class CannotCompute(Exception):
    """The engine of this worker could not compute a self-test prompt; the partner is not the cause."""


class CannotCompare(CannotCompute):
    """The engine could not compute digests of its KV now. That says nothing about the exchange."""


class SelfTestHandler:
    """Runs KV self-tests with partners and serves theirs. Its engine calls are not legs: no router waits for them."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        engine: Engine,
        identity: Identity,
        settled: Settled,
        measure: Measure,
        digest: Digest,
    ) -> None:
        """``settled`` is called before each read of a partner's KV, ``measure`` after each that passed."""
        self._settled = settled
        self._measure = measure
        self._digest = digest
        self._bus = bus
        self._clock = clock
        self._engine = engine
        self._me = identity
        self._slots = asyncio.Semaphore(PROMPTS_AT_ONCE_MAX)
        self._number = 0

    async def open(self) -> None:
        """Serve partners from now on. A worker serves them while it probes, or two that start would wait for each other
        for ever.
        """
        await self._bus.answer(SELF_TEST_PROMPT, self._make_prompt, worker_id=self._me.worker_id)
        await self._bus.answer(RUN_SELF_TEST, self._run, worker_id=self._me.worker_id)

    async def try_with(self, partner: WorkerRecord) -> Result:
        """Test each direction that is possible: this engine reads the partner's KV, the partner reads this engine's. An
        engine without prefix caching cannot lend blocks by hash.
        """
        results = []
        async with asyncio.TaskGroup() as directions:
            if partner.prefix_caching:
                results.append(directions.create_task(self._read_from(partner), name="read-self-test"))
            if self._engine.facts.prefix_caching:
                results.append(directions.create_task(self._lend_to(partner.worker_id), name="lend-self-test"))
        if partner.prefix_caching and results[0].result().outcome is Outcome.PASSED:
            await self._measure(partner.worker_id, partner.epoch)  # After the partner has measured.
        return worst(task.result() for task in results)

    async def _read_from(self, partner: WorkerRecord) -> Result:
        await self._settled(partner.worker_id, CONNECT_S_MAX)
        try:
            prompt = await self._ask_for(partner.worker_id)
        except BusError as error:
            return Result(Outcome.INCONCLUSIVE, f"it sends no prompt: {error or type(error).__name__}")
        if prompt.epoch != partner.epoch:
            return Result(Outcome.INCONCLUSIVE, "it has been restarted")
        return (await self._read(prompt)).result

    async def _ask_for(self, worker_id: WorkerId) -> SelfTestPrompt:
        ask = AskSelfTestPrompt(worker_id=worker_id, reader_id=self._me.worker_id)
        return await self._bus.ask(SELF_TEST_PROMPT, ask, timeout_s=PROMPT_S_MAX)

    async def _lend_to(self, reader: WorkerId) -> Result:
        ask = RunSelfTest(worker_id=reader, source_id=self._me.worker_id, source_epoch=self._me.epoch)
        try:
            result = await self._bus.ask(RUN_SELF_TEST, ask, timeout_s=RUN_S_MAX)
        except BusError as error:
            return Result(Outcome.INCONCLUSIVE, f"it does not read this worker's KV: {error or type(error).__name__}")
        if result.failure:
            return Result(Outcome.FAILED, f"it cannot read this worker's KV: {result.failure}")
        return PASSED

    async def _make_prompt(self, _ask: AskSelfTestPrompt, _envelope: Envelope) -> SelfTestPrompt:
        """Handler of SELF_TEST_PROMPT. Raises AskRefused."""
        if not self._engine.facts.prefix_caching:
            raise _busy("its engine has no prefix caching, so it lends no blocks by hash")
        if self._slots.locked():
            raise _busy(f"it computes {PROMPTS_AT_ONCE_MAX} self-test prompts already")
        async with self._slots:
            try:
                async with asyncio.timeout(PROMPT_S_MAX):
                    prompt = await self._new_prompt()
                    _report, computed = await self._compute(prompt)
            except (CannotCompute, TimeoutError) as error:
                raise _busy(str(error) or f"it did not compute the prompt within {PROMPT_S_MAX:g} s") from error
        me = self._me
        return SelfTestPrompt(
            worker_id=me.worker_id,
            epoch=me.epoch,
            tokens=prompt,
            likely=list(computed.logprobs)[:LIKELY_TOKENS_MAX],
            logprobs=list(computed.logprobs.values())[:LIKELY_TOKENS_MAX],
            digests=list(computed.digests),
        )

    async def _run(self, ask: RunSelfTest, _envelope: Envelope) -> SelfTestResult:
        """Handler of RUN_SELF_TEST. Raises AskRefused where the test is inconclusive."""
        await self._settled(ask.source_id, CONNECT_S_MAX)
        me, began = self._me, self._clock.now()
        try:
            prompt = await self._ask_for(ask.source_id)
        except AskRefused as refused:
            raise AskRefused(refused.failure) from refused
        except BusError as error:
            text = f"it sent no prompt: {error or type(error).__name__}"
            return SelfTestResult(worker_id=me.worker_id, epoch=me.epoch, failure=text)
        if prompt.epoch != ask.source_epoch:
            raise AskRefused(Failure(reason=Reason.WORKER_LOST, message="the source has been restarted"))
        read = await self._read(prompt)
        result, leg = read.result, read.leg
        took_s = self._clock.now() - began
        if result.outcome is Outcome.INCONCLUSIVE:
            raise _busy(result.failure)
        if result.outcome is Outcome.PASSED:
            await self._measure(prompt.worker_id, prompt.epoch)
        return SelfTestResult(
            worker_id=me.worker_id,
            epoch=me.epoch,
            fetched_tokens=leg.received_tokens if leg else 0,
            bytes=leg.received_bytes if leg else 0,
            seconds=took_s,
            logprob_difference=read.logprob_difference,
            failure=result.failure,
        )

    async def _read(self, prompt: SelfTestPrompt) -> Read:
        """Fetch the prompt's blocks as any request does, compute its tail, and compare."""
        if why := why_unsound(prompt):
            return Read(Result(Outcome.FAILED, f"it sent a prompt that cannot be used: {why}"))
        sources = [KvSource(worker_id=prompt.worker_id, epoch=prompt.epoch)]
        try:
            async with asyncio.timeout(READ_S_MAX):
                leg, computed = await self._compute(prompt.tokens, sources, prompt.likely)
        except CannotCompare as error:
            return Read(Result(Outcome.INCONCLUSIVE, str(error)))
        except (CannotCompute, TimeoutError) as error:
            text = str(error) or f"the reading engine was not done within {READ_S_MAX:g} s"
            return Read(Result(Outcome.FAILED, text))
        arrived = check_report(leg.transfer_report, self._engine.facts.hashing.handed_over(len(prompt.tokens)))
        if arrived.outcome is not Outcome.PASSED:
            return Read(arrived, leg)
        held = Computed(prompt.digests, dict(zip(prompt.likely, prompt.logprobs, strict=True)))
        difference = logprob_difference(held.logprobs, computed.logprobs) if computed.logprobs else 0.0
        return Read(compare(held, computed), leg, difference)

    async def _new_prompt(self) -> list[int]:
        """Random tokens of the model's vocabulary, so that no cache has them. Raises CannotCompute."""
        facts = self._engine.facts
        count = prompt_tokens(facts.hashing, facts.max_model_len)
        text = " ".join(str(secrets.randbelow(NUMBERS_MAX)) for _ in range(count))
        body = msgspec.json.encode({"model": facts.models[0], "prompt": text})
        tokenized = await self._engine.tokens(PATH, body)
        if not 0 < count <= len(tokenized.tokens):
            why = tokenized.refusal or "they are too few"
            raise CannotCompute(f"no self-test can be made of {len(tokenized.tokens)} tokens: {why}")
        return tokenized.tokens[-count:]

    async def _compute(
        self, prompt: list[int], sources: Sequence[KvSource] = (), likely: Sequence[int] = ()
    ) -> tuple[LegResult, Computed]:
        """Compute a prompt, with the KV of ``sources``, and a token after it. ``likely``: tokens whose log
        probabilities are wanted; none: those of the most likely tokens. Raises CannotCompute, CannotCompare.
        """
        order = LegOrder(sources=list(sources), offer=True, offer_id=new_lease_id())
        wanted: dict[str, Any] = {"logprobs": LIKELY_TOKENS_MAX, "return_tokens_as_token_ids": True}
        if likely and self._engine.facts.scores_tokens:
            wanted["logprob_token_ids"] = list(likely)
        leg, status, response = await self._generate(prompt, order, wanted)
        if status == BAD_REQUEST and leg.transfer_report is None:
            # It computed nothing: an operator may have switched log probabilities off (--max-logprobs).
            leg, status, response = await self._generate(prompt, order, {})
        # vLLM computes the prompt and then answers 400 if log probabilities are NaN, which JSON does not have. Now the
        # prompt is cached, so a second time nothing of it would be read.
        are_numbers = status != BAD_REQUEST or leg.transfer_report is None
        if status != OK and are_numbers:
            raise CannotCompute(f"the engine answers {status}: {response.decode(errors='replace')[:ERROR_CHARS_MAX]}")
        offer = leg.transfer_report.offer if leg.transfer_report else None
        if offer is None:
            raise CannotCompare("the engine lends no more blocks now, so their KV cannot be compared")
        digested = await self._digest(offer.lease_id)
        if digested.failure:
            raise CannotCompare(f"the engine's KV cannot be compared: {digested.failure}")
        logprobs = logprobs_of(response) if are_numbers else dict.fromkeys(likely, math.nan)
        if are_numbers and not self._engine.facts.scores_tokens:
            logprobs = with_missing(logprobs, likely)
        return leg, Computed(digested.digests, logprobs)

    async def _generate(
        self, prompt: list[int], order: LegOrder, wanted: dict[str, Any]
    ) -> tuple[LegResult, int, bytes]:
        """Generate greedily; returns the server's status and response."""
        self._number += 1
        request_id = f"self-test-{self._me.worker_id}-{self._number}"
        leg = Leg(LegInput(request_id=request_id, trace_headers=dict(NOT_TRACED), order=order))
        params = {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True, **wanted}
        body = msgspec.json.encode({"model": self._engine.facts.models[0], "prompt": prompt, **params})
        calling = asyncio.create_task(self._call(leg, body), name="self-test")
        try:
            return leg.result, *await calling
        finally:
            calling.cancel()

    async def _call(self, leg: Leg, body: bytes) -> tuple[int, bytes]:
        CURRENT_LEG.set(leg)  # In the context of this task alone.
        try:
            return await ask_app(self._engine.app, PATH, body)
        except Exception as error:  # The engine's server failed on a prompt that belongs to no client.
            log.exception("a KV self-test failed")
            raise CannotCompute(f"{type(error).__name__}: {error}") from error


class _LogProbs(msgspec.Struct):
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(msgspec.Struct):
    logprobs: _LogProbs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []


def logprobs_of(response: bytes) -> dict[int, float]:
    """Log probabilities of the first token of a completion, by token id; empty if the response has none."""
    try:
        choices = msgspec.json.decode(response, type=_Completion).choices
    except msgspec.DecodeError:
        return {}
    found = choices[0].logprobs if choices else None
    first = (found.top_logprobs[0] if found is not None and found.top_logprobs else None) or {}
    ids = {name.removeprefix(NAME_OF_ID): logprob for name, logprob in first.items() if name.startswith(NAME_OF_ID)}
    return {int(name): logprob for name, logprob in ids.items() if name.isdecimal()}


def with_missing(logprobs: dict[int, float], likely: Sequence[int]) -> dict[int, float]:
    """The log probabilities of an engine's most likely tokens, and of those of ``likely`` that are not among them. They
    have the lowest of the others: with the same KV the engines' last ones are about equal, whichever tokens they are.
    """
    lowest = min(logprobs.values(), default=-math.inf)
    return logprobs and dict.fromkeys(likely, lowest) | logprobs


def _busy(message: str) -> AskRefused:
    return AskRefused(Failure(reason=Reason.WORKER_BUSY, message=message))


class ReadSpeeds:
    """How fast this worker reads its partners' KV: measured after each passed self-test, published in its record. One
    measurement runs at a time, because two at a time would slow each other.
    """

    def __init__(
        self,
        measure: Callable[[WorkerId, Epoch], Awaitable[ReadMeasured]],
        registration: Registration,
        way_from: Callable[[WorkerId], str],
    ) -> None:
        """``way_from``: see ``KvReadSpeed.way``."""
        self._measure = measure
        self._registration = registration
        self._way_from = way_from
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0

    async def measure(self, source: WorkerId, epoch: Epoch) -> None:
        """Measure, log and publish within MEASURE_S_MAX. Never raises; a speed that cannot be measured is logged."""
        if self._waiting > WAITING_MAX:
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(MEASURE_S_MAX), self._one_at_a_time:
                measured = await self._measure(source, epoch)
        except TimeoutError:
            measured = ReadMeasured(measure_id="", failure=f"it was not measured within {MEASURE_S_MAX:g} s")
        finally:
            self._waiting -= 1
        if measured.failure:
            log.info("the speed of reads from %s is not known: %s", source, measured.failure)
            return
        record, way = self._registration.record, self._way_from(source)
        log.info("reads KV from %s at %s%s", source, bytes_per_second(measured.bytes_per_s), f" ({way})" if way else "")
        listed = updated(record.kv_reads, source, measured, way)
        await self._registration.update(msgspec.structs.replace(record, kv_reads=listed))


def updated(listed: list[KvReadSpeed], source: WorkerId, measured: ReadMeasured, way: str) -> list[KvReadSpeed]:
    """With the new speed, oldest first; at most KV_SPEEDS_MAX."""
    new = KvReadSpeed(
        source_id=source,
        bytes_per_s=min(KV_SPEED_MAX, int(measured.bytes_per_s)),
        memory=measured.memory,
        way=way,
        notice_s=measured.notice_s,
        bus_s=measured.bus_s,
    )
    return [*(one for one in listed if one.source_id != source), new][-KV_SPEEDS_MAX:]
