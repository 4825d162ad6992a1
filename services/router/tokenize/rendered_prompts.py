"""Prompts that a worker renders: those of messages and responses, which vLLM's server turns into chats by rules of its
own, those with tools or documents, and those with images, audio or video, whose tokens and names only the engine's
processor knows.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from enum import StrEnum
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from services.router.request.facts import RequestFacts
from services.router.request.http_request import HttpRequest
from services.router.request.prompt import Prompt
from services.router.state.cluster_view import ClusterView
from services.router.state.worker_view import WorkerView
from services.router.tokenize.turns import Work
from shared.bus.port import AskTimedOut, Bus, BusError
from shared.contracts.channels import RENDER
from shared.contracts.ids import WorkerId
from shared.contracts.inference import RENDER_S_MAX, RENDERED_BODY_BYTES_MAX, RenderedPrompt, RenderPrompt
from shared.contracts.kv_events import unpack_hashes
from shared.fair_slots import FairSlots, NoTurn
from shared.runtime.clock import Clock

ASKS_AT_ONCE_MAX = 16
WAITING_MAX = 256
TENANT_WAITING_MAX = 32
"""Prompts that wait for their turn to be rendered, of all tenants and of one."""
HASHED_ON_LOOP_BYTES = 256 * 1024
"""The digest of a larger body is computed in a thread."""
KEPT_S_MAX = 60.0
"""How long a rendered prompt is kept for a retry. A worker may be restarted with another chat template."""
KEPT_BLOCKS_MAX = 128 * 1024
"""Blocks of all prompts that are kept; 40 bytes each."""
KEPT_MAX = 1024
DIGEST_BYTES = 32
MEDIA: Final = re.compile(rb'"(?:input_)?(?:image|audio|video|file)(?:_url|_embeds|_pil)?"')
"""The names of types and fields of parts that are media, as vLLM reads them."""
ADDRESS: Final = re.compile(
    rb'"(?:(?:image|audio|video)_url"\s*:\s*(?:\{[^{}]{0,64}?"url"\s*:\s*)?|type"\s*:\s*"url"\s*,\s*"url"\s*:\s*)"(?!(?i:data):)'
)
"""The usual forms of a medium that an engine would have to fetch. The media of any other form are fetched twice, if the
engine may fetch them: when the prompt is rendered, and when it is served.
"""
REACHES_LAST_BLOCK = "a medium reaches into the last block, which the decode worker would compute"


class Outcome(StrEnum):
    """How the rendering of a prompt at a worker ended."""

    RENDERED = "rendered"
    KEPT = "kept"
    """The prompt was rendered shortly before."""
    NO_WORKER = "no_worker"
    TOO_LARGE = "too_large"
    ADDRESSES = "addresses"
    BUSY = "busy"
    LATE = "late"
    REFUSED = "refused"
    FAILED = "failed"


WHY = {
    Outcome.NO_WORKER: "no worker that is ready renders prompts",
    Outcome.TOO_LARGE: f"bodies of more than {RENDERED_BODY_BYTES_MAX} bytes are not rendered",
    Outcome.ADDRESSES: "media that engines fetch are not rendered",
    Outcome.BUSY: "too many prompts wait to be rendered",
    Outcome.LATE: f"it was not rendered within {RENDER_S_MAX:g} s",
    Outcome.REFUSED: "the worker does not render it",
    Outcome.FAILED: "the worker did not reply",
}
"""What the decision record says of a prompt that is placed by load alone."""


def has_media(messages: msgspec.Raw) -> bool:
    """Whether parts of these messages may be media: a quick look that takes a text in quotes for text."""
    return MEDIA.search(memoryview(messages)) is not None


class NotRendered(Exception):
    """The prompt is placed by load alone."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(WHY[outcome])
        self.outcome = outcome


class Kept(NamedTuple):
    """A rendered prompt, until ``ends_at``."""

    prompt: Prompt
    ends_at: float


class KeptPrompts:
    """The prompts that were rendered last, by digest."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._blocks = 0

    def get(self, key: bytes, now: float) -> Prompt | None:
        """None when it was never rendered, or too long ago."""
        kept = self._kept.get(key)
        return kept.prompt if kept is not None and now < kept.ends_at else None

    def put(self, key: bytes, prompt: Prompt, now: float) -> None:
        """Drops the oldest beyond the bounds."""
        if (replaced := self._kept.pop(key, None)) is not None:
            self._blocks -= len(replaced.prompt.hashes)
        self._kept[key] = Kept(prompt, now + KEPT_S_MAX)
        self._blocks += len(prompt.hashes)
        while self._blocks > KEPT_BLOCKS_MAX or len(self._kept) > KEPT_MAX:
            _, oldest = self._kept.popitem(last=False)
            self._blocks -= len(oldest.prompt.hashes)


class RenderedPrompts:
    """``of`` asks one worker, and ends within ``RENDER_S_MAX``."""

    def __init__(self, bus: Bus, clock: Clock, cluster: ClusterView, *, silent_s_max: float) -> None:
        self._bus = bus
        self._now = clock.now
        self._cluster = cluster
        self._silent_s_max = silent_s_max
        self._slots = FairSlots(ASKS_AT_ONCE_MAX, waiting_max=WAITING_MAX, tenant_waiting_max=TENANT_WAITING_MAX)
        self._asked: Counter[WorkerId] = Counter()
        """Asks in flight, by worker."""
        self._kept = KeptPrompts()
        self.counts: dict[str, int] = dict.fromkeys(Outcome, 0)
        """How often each outcome occurred, for metrics."""

    async def of(self, http_request: HttpRequest, facts: RequestFacts, like: WorkerView, work: Work) -> Prompt:
        """The prompt as an engine of the same fingerprint as ``like`` reads it. Raises NotRendered."""
        try:
            prompt, outcome = await self._of(http_request, facts, like, work)
        except NotRendered as not_rendered:
            self.counts[not_rendered.outcome] += 1
            raise
        self.counts[outcome] += 1
        return prompt

    async def _of(
        self, http_request: HttpRequest, facts: RequestFacts, like: WorkerView, work: Work
    ) -> tuple[Prompt, Outcome]:
        size = http_request.upload.size
        if size > RENDERED_BODY_BYTES_MAX:
            raise NotRendered(Outcome.TOO_LARGE)
        try:
            async with work.within(RENDER_S_MAX):
                work.hold(size)
                body = http_request.upload.body()
                key = await self._digest(body, facts, like, work)
                if (kept := self._kept.get(key, self._now())) is not None:
                    return kept, Outcome.KEPT
                async with self._slots.slot(work.tenant):
                    prompt = await self._ask(body, facts, like)
        except TimeoutError:
            raise NotRendered(Outcome.LATE) from None
        except NoTurn:
            raise NotRendered(Outcome.BUSY) from None
        self._kept.put(key, prompt, self._now())
        return prompt, Outcome.RENDERED

    async def _digest(self, body: bytes, facts: RequestFacts, like: WorkerView, work: Work) -> bytes:
        """The digest of everything that the result depends on. Raises NotRendered, and NoTurn."""
        about = (like.pairs_with, facts.path, facts.model, like.digest_of(facts.model), facts.salt, facts.media_salt)

        def digest() -> bytes:
            if ADDRESS.search(body) is not None:
                raise NotRendered(Outcome.ADDRESSES)
            named = blake2b(msgspec.msgpack.encode(about), digest_size=DIGEST_BYTES)
            named.update(body)
            return named.digest()

        return digest() if len(body) <= HASHED_ON_LOOP_BYTES else await work.run(digest, slow=True)

    async def _ask(self, body: bytes, facts: RequestFacts, like: WorkerView) -> Prompt:
        view = self._idlest(facts, like)
        worker_id = view.record.worker_id
        ask = RenderPrompt(
            worker_id=worker_id, path=facts.path, body=body, cache_salt=facts.salt, media_salt=facts.media_salt
        )
        self._asked[worker_id] += 1
        try:
            return prompt_of(await self._bus.ask(RENDER, ask, timeout_s=RENDER_S_MAX), view)
        except AskTimedOut:
            raise NotRendered(Outcome.LATE) from None
        except BusError:
            raise NotRendered(Outcome.FAILED) from None
        except ValueError:
            raise NotRendered(Outcome.REFUSED) from None
        finally:
            self._asked[worker_id] -= 1
            if not self._asked[worker_id]:
                del self._asked[worker_id]

    def _idlest(self, facts: RequestFacts, like: WorkerView) -> WorkerView:
        """Rendering delays the media of this worker's own requests."""
        now, digest = self._now(), like.digest_of(facts.model)
        able = [
            view
            for view in self._cluster.offering(facts.model)
            if view.record.renders and view.pairs_with == like.pairs_with and view.fit(now, self._silent_s_max)
            if view.digest_of(facts.model) == digest
        ]
        if not able:
            raise NotRendered(Outcome.NO_WORKER)
        return min(able, key=lambda view: (self._asked[view.record.worker_id], view.legs))


def prompt_of(reply: RenderedPrompt, view: WorkerView) -> Prompt:
    """Raises ValueError for a refusal, and for a reply that cannot be true."""
    record = view.record
    hashes = list(unpack_hashes(reply.hashes))
    full, block_size = len(hashes), record.hashing.block_size
    possible = 0 <= reply.media_end <= reply.tokens <= record.max_model_len and full * block_size <= reply.tokens
    if reply.refusal or reply.epoch != record.epoch or not reply.tokens or not possible:
        raise ValueError(reply.refusal or "the reply contradicts itself")
    unsplittable = REACHES_LAST_BLOCK if reply.media_end > record.hashing.handed_over(reply.tokens) else ""
    return Prompt(reply.tokens, hashes, exact=True, unsplittable=unsplittable)
