"""SelfTests on the bus: this worker's own for whoever wants to read them, and those of others that it reads itself."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass

import msgspec

from services.worker.engines.port import CURRENT_LEG, Engine, Identity, LegRecord
from services.worker.legs.asgi_call import ask_app
from services.worker.lifecycle import self_test as core
from services.worker.lifecycle.self_test import Finding, Outcome
from shared.bus.port import AskRefused, Bus, BusError, Envelope
from shared.contracts.channels import RUN_SELF_TEST, SELF_TEST_PROMPT
from shared.contracts.failures import Failure, Reason
from shared.contracts.fleet_orders import AskSelfTestPrompt, RunSelfTest, SelfTestPrompt, SelfTestResult
from shared.contracts.ids import RequestId, WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvSource, LegOrder
from shared.contracts.workers import WorkerRecord
from shared.runtime.clock import Clock
from shared.telemetry.propagation import NOT_TRACED

log = logging.getLogger("baton.worker")

PATH = "/v1/completions"
OK = 200
SELF_TESTS_AT_ONCE_MAX = 8
"""That an engine computes for others; who asks for one more asks somebody else."""
SELF_TEST_S_MAX = 5.0
"""For a partner to compute its self_test; after that it counts as too busy."""
READ_S_MAX = 10.0
"""For this engine to read a self_test and answer it."""
TRY_S_MAX = SELF_TEST_S_MAX + READ_S_MAX
"""For a partner to read ours."""
ERROR_CHARS_MAX = 300


class CannotTry(Exception):
    """Our engine could not compute a self_test; whoever reads it is not to blame."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What the engine made of a prompt."""

    tokens: list[int]
    record: LegRecord


class SelfTestHandler:
    """See the module. What happens here is no leg: nobody waits for its tokens but another worker."""

    def __init__(self, bus: Bus, clock: Clock, engine: Engine, identity: Identity) -> None:
        self._bus = bus
        self._clock = clock
        self._engine = engine
        self._me = identity
        self._slots = asyncio.Semaphore(SELF_TESTS_AT_ONCE_MAX)
        self._number = 0

    async def open(self) -> None:
        """Answer from now on: a worker that probes answers those that probe, or two that start would wait for ever."""
        await self._bus.answer(SELF_TEST_PROMPT, self._make, worker_id=self._me.worker_id)
        await self._bus.answer(RUN_SELF_TEST, self._try_for, worker_id=self._me.worker_id)

    async def try_with(self, partner: WorkerRecord) -> Finding:
        """Test each direction that is possible: this engine reads the partner's KV, the partner reads this engine's. An
        engine without prefix caching cannot lend blocks by hash.
        """
        findings = []
        async with asyncio.TaskGroup() as directions:
            if partner.prefix_caching:
                findings.append(directions.create_task(self._read_from(partner), name="read-self-test"))
            if self._engine.facts.prefix_caching:
                findings.append(directions.create_task(self._have_read(partner.worker_id), name="lend-self-test"))
        return min((found.result() for found in findings), key=core.severity, default=core.FINE)

    async def _read_from(self, partner: WorkerRecord) -> Finding:
        try:
            self_test = await self._ask_for(partner.worker_id)
        except BusError as error:
            return Finding(Outcome.UNANSWERED, f"it gives no self_test: {error or type(error).__name__}")
        if self_test.epoch != partner.epoch:
            return Finding(Outcome.UNANSWERED, "another life of it answers")
        found, _answer = await self._read(self_test)
        return found

    async def _ask_for(self, worker_id: WorkerId) -> SelfTestPrompt:
        ask = AskSelfTestPrompt(worker_id=worker_id, reader_id=self._me.worker_id)
        return await self._bus.ask(SELF_TEST_PROMPT, ask, timeout_s=SELF_TEST_S_MAX)

    async def _have_read(self, reader: WorkerId) -> Finding:
        ask = RunSelfTest(worker_id=reader, source_id=self._me.worker_id, source_epoch=self._me.epoch)
        try:
            tried = await self._bus.ask(RUN_SELF_TEST, ask, timeout_s=TRY_S_MAX)
        except BusError as error:
            return Finding(Outcome.UNANSWERED, f"it does not read ours: {error or type(error).__name__}")
        return Finding(Outcome.FAILED, f"it cannot read ours: {tried.failure}") if tried.failure else core.FINE

    async def _make(self, _ask: AskSelfTestPrompt, _envelope: Envelope) -> SelfTestPrompt:
        """Answerer of SELF_TEST_PROMPT. Raises AskRefused."""
        if not self._engine.facts.prefix_caching:
            message = "its engine has no prefix caching, so it lends no blocks by hash"
            raise AskRefused(Failure(reason=Reason.WORKER_BUSY, message=message))
        if self._slots.locked():
            raise AskRefused(Failure(reason=Reason.WORKER_BUSY, message="it computes as many self_tests as it may"))
        async with self._slots:
            try:
                async with asyncio.timeout(SELF_TEST_S_MAX):
                    prompt = await self._prompt()
                    answer = await self._answer(prompt, LegOrder())
            except (CannotTry, TimeoutError) as error:
                message = str(error) or f"it did not compute its self_test within {SELF_TEST_S_MAX:g} s"
                raise AskRefused(Failure(reason=Reason.WORKER_BUSY, message=message)) from error
        me = self._me
        return SelfTestPrompt(worker_id=me.worker_id, epoch=me.epoch, tokens=prompt, answer=answer.tokens)

    async def _try_for(self, ask: RunSelfTest, _envelope: Envelope) -> SelfTestResult:
        """Answerer of RUN_SELF_TEST."""
        me, began = self._me, self._clock.now()
        try:
            self_test = await self._ask_for(ask.source_id)
        except AskRefused as refused:
            raise AskRefused(refused.failure) from refused
        except BusError as error:
            words = f"it gave no self_test: {error or type(error).__name__}"
            return SelfTestResult(worker_id=me.worker_id, epoch=me.epoch, failure=words)
        if self_test.epoch != ask.source_epoch:
            raise AskRefused(Failure(reason=Reason.WORKER_LOST, message="another life of it answers"))
        found, answer = await self._read(self_test)
        if found.outcome is Outcome.UNANSWERED:
            raise AskRefused(Failure(reason=Reason.WORKER_BUSY, message=found.why))
        return SelfTestResult(
            worker_id=me.worker_id,
            epoch=me.epoch,
            fetched_tokens=answer.record.received_tokens if answer else 0,
            bytes=answer.record.received_bytes if answer else 0,
            seconds=self._clock.now() - began,
            failure=found.why,
            tokens=answer.tokens if answer else [],
        )

    async def _read(self, self_test: SelfTestPrompt) -> tuple[Finding, Answered | None]:
        """Fetch its blocks as any request does, compute its tail, and compare."""
        sources = [KvSource(worker_id=self_test.worker_id, epoch=self_test.epoch)]
        try:
            async with asyncio.timeout(READ_S_MAX):
                answer = await self._answer(self_test.tokens, LegOrder(sources=sources))
        except (CannotTry, TimeoutError) as error:
            words = str(error) or f"our engine did not answer within {READ_S_MAX:g} s"
            return Finding(Outcome.FAILED, words), None
        full_tokens = (len(self_test.tokens) - 1) // self._block_size * self._block_size
        read = core.read_well(answer.record.transfer_report, full_tokens)
        return (read if read is not core.FINE else core.answered_alike(self_test.answer, answer.tokens)), answer

    @property
    def _block_size(self) -> int:
        return self._engine.facts.hashing.block_size

    async def _prompt(self) -> list[int]:
        """Tokens that the model has, in an order that nobody has computed before. Raises CannotTry."""
        facts = self._engine.facts
        count = core.prompt_tokens(self._block_size, facts.max_model_len)
        words = " ".join(str(secrets.randbelow(core.NUMBERS_MAX)) for _ in range(count))
        body = msgspec.json.encode({"model": facts.models[0], "prompt": words})
        told = await self._engine.tokens(PATH, body)
        if not 0 < count <= len(told.tokens):
            raise CannotTry(
                f"no self_test can be made of {len(told.tokens)} tokens: {told.refusal or 'they are too few'}"
            )
        return told.tokens[-count:]

    async def _answer(self, prompt: list[int], order: LegOrder) -> Answered:
        """What follows, greedily. Raises CannotTry."""
        self._number += 1
        record = LegRecord(
            kind=LegKind.AGGREGATED,
            request_id=RequestId(f"self_test-{self._me.worker_id}-{self._number}"),
            trace_headers=dict(NOT_TRACED),
            order=order,
        )
        asked = {"max_tokens": core.ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True}
        body = msgspec.json.encode({"model": self._engine.facts.models[0], "prompt": prompt, **asked})
        calling = asyncio.create_task(self._call(record, body), name="self_test")
        try:
            status, answer = await calling
        finally:
            calling.cancel()
        if status != OK:
            raise CannotTry(f"the engine answers {status}: {answer.decode(errors='replace')[:ERROR_CHARS_MAX]}")
        return Answered(record.token_ids, record)

    async def _call(self, record: LegRecord, body: bytes) -> tuple[int, bytes]:
        CURRENT_LEG.set(record)  # of this task
        try:
            return await ask_app(self._engine.app, PATH, body)
        except Exception as error:  # the engine's server failed on a prompt that is nobody's: no request suffers
            log.exception("a self_test failed")
            raise CannotTry(f"{type(error).__name__}: {error}") from error
