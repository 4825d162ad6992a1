"""The tokenizers of all models, fetched from workers once per fingerprint, and when prompts are tokenized with them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import parse_qs

import msgspec

from services.router.placement.fleet import Fleet
from services.router.placement.revisions import Shares
from services.router.request.facts import Body, Fault, RequestFacts
from services.router.request.fields import MODEL_CHARS_MAX, read_request
from services.router.request.form import read_form_request
from services.router.request.http_request import HttpRequest
from services.router.request.prompt import Prompt
from services.router.settings import Settings
from services.router.state.revision_names import means
from services.router.state.worker_view import WorkerView
from services.router.tokenize.parity import ParityWatch
from services.router.tokenize.rendered_prompts import NotRendered, RenderedPrompts, has_media
from services.router.tokenize.tokenizer import (
    BYTES_PER_TOKEN_GUESSED,
    PromptTokenizer,
    TokenIds,
    Unfinished,
    guessed_tokens,
    is_plain_chat,
    prompt_bytes,
)
from services.router.tokenize.trials import Trials
from services.router.tokenize.turns import PromptWork, Work
from shared.bus.port import Bus, BusError
from shared.contracts.channels import TOKENIZER
from shared.contracts.control import AskTokenizer, TokenizerAsset
from shared.contracts.engine_paths import (
    CHAT,
    COMPLETIONS,
    FORMS,
    GENERATE,
    MESSAGES,
    PLACED,
    RESPONSES,
    TOKENIZER_INFO,
)
from shared.contracts.failures import Reason
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.request_body import prompt_chars_max
from shared.contracts.workers import WITHOUT_ENGINE, Fingerprint, WorkerRecord
from shared.fair_slots import NoTurn
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

READ_ON_LOOP_BYTES: Final = 256 * 1024
"""A larger body is read in a thread: this much takes a millisecond."""
LOOP_CHARS_MAX: Final = 4096
"""Characters of a prompt that are tokenized on the event loop. The rest of a longer prompt is tokenized in a thread."""
TOKENIZER_S_MAX: Final = 30.0
"""Time limit for a worker to read and send its tokenizer."""
RETRY_S: Final = 5.0
"""Delay after a tokenizer could not be fetched."""
TOKENIZERS_MAX: Final = 64
"""Fingerprints whose tokenizers are kept. Beyond that, tokenizers without a worker are dropped; if all have one,
prompts of further fingerprints are placed by load alone.
"""
SEGMENTS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Size of the cache of prompt segments with their tokens and block hashes, for each tokenizer."""
BYTES_PER_TOKEN_MAX: Final = 16
"""Bytes of a body per token of the model's maximum length. Larger bodies are not tokenized: the engine refuses them."""

NOT_READ: Final = "the prompt cannot change where the request is served, so that it was not tokenized"
NO_TOKENIZER: Final = "the router has no tokenizer for this model's engine"
TOO_LONG: Final = "the body is longer than any prompt that the model can take"
DIFFERS: Final = "this engine's tokens differ from those of the router's tokenizer"
NOT_NOW: Final = "the router's tokenizer failed, or had no time"
ATTACHED: Final = "its workers are attached to servers outside of Baton, which show no tokens"
QUERY_FIELDS_MAX: Final = 16
READERS_MAX: Final = 1024
"""Kinds of requests whose readers are remembered: clients can make up names of models."""

PROBES: Final = "probes"
"""The tenant of the router's own work."""
BUSY: Final = Fault(
    param="", message="The router reads too many large requests. Try again shortly.", reason=Reason.WORKER_BUSY
)


class UnreadPrompt(NamedTuple):
    """A prompt that cannot be read at once."""

    http_request: HttpRequest
    facts: RequestFacts
    more: Sequence[int]
    view: WorkerView
    """A worker that reads prompts as the request's worker will."""
    known: PromptTokenizer | TokenIds | None
    begun: Unfinished | None
    """None: only a worker can say how its engine reads it."""


class Prompts:
    """Tokenizes prompts for placement. ``follow`` fetches the tokenizers; ``of`` never fails a request."""

    def __init__(
        self, settings: Settings, bus: Bus, clock: Clock, fleet: Fleet, shares: Shares, trials: Trials | None = None
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._fleet = fleet
        self._work = PromptWork.in_threads()
        self.rendered = RenderedPrompts(bus, clock, fleet.cluster, silent_s_max=fleet.policy.silent_s_max)
        self.parity = ParityWatch(bus, clock, fleet, self)
        self._tokenizers: dict[str, PromptTokenizer | None] = {}
        """Tokenizers by fingerprint. None: the router cannot tokenize as this engine does."""
        self._sources: dict[str, tuple[WorkerId, Epoch]] = {}
        """The worker that sent the tokenizer, by fingerprint."""
        self._failures: dict[str, str] = {}
        """Why a tokenizer or a chat template of a worker is not used, by fingerprint."""
        self._trials = trials or Trials()
        self._try_at: dict[str, float] = {}
        self._readers: dict[tuple[str, str, bool], WorkerView | None] = {}
        """Results of ``_reader``, by model, by why the request cannot be split, and by whether the body is long enough
        to fetch KV for.
        """
        self._shares = shares
        self._wake = asyncio.Event()

    async def of(self, http_request: HttpRequest, facts: RequestFacts, more: Sequence[int] = ()) -> Prompt:
        """The prompt, tokenized where that can change the placement, else a guess from the body's size. ``more``:
        tokens to append.
        """
        begun = self.begin(http_request, facts, more)
        return await self.finish(begun) if isinstance(begun, UnreadPrompt) else begun

    def begin(self, http_request: HttpRequest, facts: RequestFacts, more: Sequence[int] = ()) -> Prompt | UnreadPrompt:
        """As ``of``, for all that takes less than a millisecond; ``finish`` does the rest of others."""
        size = http_request.upload.size
        view = self._reader(facts, size) if facts.path in PLACED else None
        if view is None:
            return guess_of(facts, size, more, BYTES_PER_TOKEN_GUESSED, why=NOT_READ)
        known = self._tokenizers.get(view.pairs_with)
        bytes_per_token = BYTES_PER_TOKEN_GUESSED if known is None else known.chars_per_token
        if view.record.attached:
            return guess_of(facts, size, more, bytes_per_token, why=ATTACHED)
        if facts.path == GENERATE:
            return self._begin_ids(UnreadPrompt(http_request, facts, more, view, None, None))
        unread = UnreadPrompt(http_request, facts, more, view, known, None)
        readable = size <= BYTES_PER_TOKEN_MAX * view.record.max_model_len
        if known is not None and readable and self.parity.trusted(view.pairs_with):
            adapter = view.hashed_adapter(facts.model)
            held = self._fleet.index.held
            begun = known.begin(facts, held, loop_chars_max=LOOP_CHARS_MAX, more=more, adapter=adapter)
            if isinstance(begun, Prompt):
                return begun
            if begun is not None:
                return unread._replace(begun=begun)
        if _only_engines_render(facts):
            return unread
        why = NO_TOKENIZER if known is None else TOO_LONG if not readable else NOT_NOW
        if known is not None and readable and not self.parity.trusted(view.pairs_with):
            why = DIFFERS
        return guess_of(facts, size, more, bytes_per_token, why=why)

    def _begin_ids(self, unread: UnreadPrompt) -> Prompt | UnreadPrompt:
        """As ``begin``: token ids are hashed without a tokenizer, as the record of the reader says."""
        _request, facts, more, view, _known, _begun = unread
        size, why = unread.http_request.upload.size, DIFFERS
        if size > BYTES_PER_TOKEN_MAX * view.record.max_model_len:
            why = TOO_LONG
        elif self.parity.trusted(view.pairs_with):
            try:
                known = TokenIds(view.record.hashing)
            except ValueError as error:
                why = str(error)
            else:
                begun = known.begin(facts, more, view.hashed_adapter(facts.model))
                if isinstance(begun, Prompt):
                    return begun
                if begun is not None:
                    return unread._replace(known=known, begun=begun)
                why = NOT_NOW
        return guess_of(facts, size, more, BYTES_PER_TOKEN_GUESSED, why=why)

    async def finish(self, unread: UnreadPrompt) -> Prompt:
        """What ``begin`` could not read at once. A guess, if it cannot be read in time."""
        http_request, facts, more, view, known, begun = unread
        why = NOT_NOW
        if known is not None and begun is not None:
            prompt = await known.finish(begun, self._fleet.index.held, self._work_on(http_request))
            if prompt is not None:
                return prompt
        if _only_engines_render(facts):
            try:
                prompt = await self.rendered.of(http_request, facts, view, self._work_on(http_request))
            except NotRendered as not_rendered:
                why = str(not_rendered)
            else:
                # What follows the prompt is not hashed: its blocks are nowhere but where the stream broke off.
                return _followed(prompt, more) if more else prompt
        bytes_per_token = BYTES_PER_TOKEN_GUESSED if known is None else known.chars_per_token
        return guess_of(facts, http_request.upload.size, more, bytes_per_token, why=why)

    def _work_on(self, http_request: HttpRequest) -> Work:
        return Work(self._work, tenant_of(http_request), http_request)

    def read_now(self, http_request: HttpRequest) -> RequestFacts | None:
        """As ``read``; None when the body is so large that a thread must read it."""
        if http_request.upload.size > READ_ON_LOOP_BYTES:
            return None
        return self._read(http_request, http_request.upload.body())

    async def read(self, http_request: HttpRequest) -> RequestFacts:
        """The request as placement sees it. Never fails."""
        facts = self.read_now(http_request)
        if facts is not None:
            return facts
        step = partial(self._read, http_request, http_request.upload.body())
        try:
            return await Work(self._work, tenant_of(http_request)).run(step, slow=True)
        except NoTurn:
            return RequestFacts(path=http_request.head.path, model="", fault=BUSY)

    def _read(self, http_request: HttpRequest, body: bytes) -> RequestFacts:
        head = http_request.head
        if head.path == TOKENIZER_INFO:
            return RequestFacts(path=head.path, model=model_in(head.query), body=Body())
        if head.path in FORMS:
            return read_form_request(head.path, body, head.content_type)
        return read_request(head.path, body)

    async def whole(
        self, tokenizer: PromptTokenizer, facts: RequestFacts, adapter: tuple[str, str] | None = None
    ) -> Prompt | None:
        """All of a probe's prompt; None when it cannot be known exactly now."""
        try:
            return await Work(self._work, PROBES).run(partial(tokenizer.whole_prompt, facts, adapter))
        except NoTurn:
            return None

    def workers_changed(self) -> None:
        """Workers have come or gone, or have other records."""
        self._readers.clear()

    def _reader(self, facts: RequestFacts, body_bytes: int) -> WorkerView | None:
        """The worker that should read the prompt, or one like it; None where the prompt cannot change the placement.
        Found by looking at the records of all workers, and remembered until one of them changes.
        """
        if facts.body is None:
            return None
        if facts.path in (COMPLETIONS, GENERATE):  # Other fields make it no longer.
            body_bytes = prompt_bytes(facts.body)
        if facts.kv_fetch_min_tokens is not None or self._shares.models:
            return self._likely_worker(facts) if self._matters(facts, body_bytes) else None
        kind = facts.model, facts.unsplittable, body_bytes >= self._fleet.policy.fetch_tokens_min
        try:
            return self._readers[kind]
        except KeyError:
            if len(self._readers) >= READERS_MAX:
                self._readers.clear()
            reader = self._likely_worker(facts) if self._matters(facts, body_bytes) else None
            self._readers[kind] = reader
            return reader

    def _likely_worker(self, facts: RequestFacts) -> WorkerView | None:
        """A worker of the revision that should serve the request: another one may tokenize the prompt differently. An
        attached one only where there is no other.
        """
        views: Iterable[WorkerView] = self._fleet.cluster.offering(facts.model)
        if self._fleet.cluster.has_attached:
            views = sorted(views, key=lambda view: view.record.attached)
        for revision in self._shares.order(facts):
            for view in views:
                if means(revision, view.record.fingerprint.revision):
                    return view
        return next(iter(views), None)

    def worker_seen(self, record: WorkerRecord) -> None:
        """A worker has registered: probe it, and fetch its tokenizer if that is missing. An attached one has none."""
        if record.attached:
            return
        self.parity.worker_seen(record)
        key = record.fingerprint.key()
        if key in self._failures and self._source_is_gone(record):
            self._forget(key)  # Its workers may have been restarted because it failed.
        if key not in self._tokenizers:
            self._wake.set()

    def followed(self, fingerprint: str) -> bool:
        """Whether the router can tokenize prompts of this fingerprint as the engine does."""
        known = self._tokenizers.get(fingerprint)
        return known is not None and not known.failure and self.parity.trusted(fingerprint)

    def failure(self, fingerprint: str) -> str:
        """Why prompts of this fingerprint, or chats only, are placed by load alone: what its worker sent failed. Empty
        where nothing did.
        """
        known = self._tokenizers.get(fingerprint)
        failed = known.failure if known is not None else ""
        return f"its tokenizer failed: {failed}" if failed else self._failures.get(fingerprint, "")

    def tokenizer_of(self, fingerprint: str) -> PromptTokenizer | None:
        """None when there is none, or it is not fetched yet."""
        return self._tokenizers.get(fingerprint)

    def failures(self) -> Iterator[tuple[str, str]]:
        """Models of the fleet with such a reason."""
        for view in self._fleet.cluster.workers.values():
            why = self.failure(view.pairs_with)
            if why:
                yield view.record.model, why

    def doubt(self, record: WorkerRecord) -> None:
        """A worker tokenizes differently. If the worker that sent the tokenizer has restarted or left, the tokenizer is
        fetched again: all workers may have been restarted with another chat template.
        """
        if self._source_is_gone(record):
            self._forget(record.fingerprint.key())
            self._wake.set()

    def _source_is_gone(self, record: WorkerRecord) -> bool:
        """Whether the worker that sent the tokenizer of this one's fingerprint has left or restarted."""
        worker_id, epoch = self._sources.get(record.fingerprint.key(), (record.worker_id, record.epoch))
        source = self._fleet.cluster.workers.get(worker_id)
        return source is None or source.record.epoch != epoch

    def _forget(self, fingerprint: str) -> None:
        self._tokenizers.pop(fingerprint, None)
        self._failures.pop(fingerprint, None)

    async def follow(self) -> None:
        """Fetch missing tokenizers until cancelled."""
        if self._settings.tokenize == "never":
            return
        while True:
            self._wake.clear()  # Workers that come while a tokenizer is tried set it again.
            waiting = await self._fetch_missing()
            try:
                async with asyncio.timeout(RETRY_S if waiting else None):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        """Stop the threads, and the child that tries a tokenizer."""
        self._work.close()
        self._trials.close()

    def _matters(self, facts: RequestFacts, body_bytes: int) -> bool:
        if self._settings.tokenize == "auto":
            return self._fleet.prompt_matters(facts, body_bytes)
        return self._settings.tokenize == "always"

    async def _fetch_missing(self) -> bool:
        """Returns whether a tokenizer is still missing."""
        waiting = False
        views = list(self._fleet.cluster.workers.values())
        for view in views:
            if view.pairs_with in self._tokenizers or not self._can_add({view.pairs_with for view in views}):
                continue
            if view.record.phase in WITHOUT_ENGINE or not view.serves or view.record.attached:
                continue
            if self._clock.now() < self._try_at.get(view.pairs_with, 0.0) or not await self._fetch(view.record):
                waiting = True
        return waiting

    def _can_add(self, needed: set[str]) -> bool:
        if len(self._tokenizers) >= TOKENIZERS_MAX:
            for fingerprint in self._tokenizers.keys() - needed:
                self._forget(fingerprint)
                self._sources.pop(fingerprint, None)
            self._try_at = {fingerprint: at for fingerprint, at in self._try_at.items() if fingerprint in needed}
        return len(self._tokenizers) < TOKENIZERS_MAX

    async def _fetch(self, record: WorkerRecord) -> bool:
        key = record.fingerprint.key()
        try:
            ask = AskTokenizer(worker_id=record.worker_id)
            asset = await self._bus.ask(TOKENIZER, ask, timeout_s=TOKENIZER_S_MAX)
        except BusError as error:
            log.info(
                "the tokenizer of %s cannot be fetched from %s yet: %s", record.models[:1], record.worker_id, error
            )
            self._try_at[key] = self._clock.now() + RETRY_S
            return False
        self._tokenizers[key], why = await self._made(asset, record)
        if why:
            log.warning("%s is placed by load alone: %s", record.models[:1], why)
        self._sources[key] = record.worker_id, asset.epoch
        self._forget_other_weights(record.fingerprint)
        self.parity.tokenizer_changed(key)
        return True

    def _forget_other_weights(self, fingerprint: Fingerprint) -> None:
        """Weights may change every minute, and each tokenizer has a cache."""
        base = fingerprint.base_key()
        alive = {view.pairs_with for view in self._fleet.cluster.workers.values()}
        alive.add(fingerprint.key())
        for known in [key for key in self._tokenizers if key == base or key.startswith(f"{base}|")]:
            if known not in alive:
                self._forget(known)
                self._sources.pop(known, None)

    async def _made(self, asset: TokenizerAsset, record: WorkerRecord) -> tuple[PromptTokenizer | None, str]:
        """A tokenizer that a child process has tried, and why it is none, or has no chat template."""
        key, why, chars_max = record.fingerprint.key(), "", prompt_chars_max(record.max_model_len)
        if asset.tokenizer_json:
            verdict = await self._trials.verdict(asset, record.hashing, chars_max)
            if verdict.template:
                why = f"its chat template failed: {verdict.template}"
                asset = msgspec.structs.replace(asset, chat_template="")
            if verdict.tokenizer:
                why = f"its tokenizer failed: {verdict.tokenizer}"
            if why:
                self._failures[key] = why
            if verdict.tokenizer:
                return None, why
        cache = SEGMENTS_BYTES_MAX
        made = partial(PromptTokenizer, asset, record.hashing, cache_bytes_max=cache, chars_max=chars_max)
        try:
            return await asyncio.to_thread(made), why
        except ValueError as error:
            return None, str(error)


def guess_of(facts: RequestFacts, body_bytes: int, more: Sequence[int], bytes_per_token: float, *, why: str) -> Prompt:
    """An estimate, and ``why`` the prompt is not known."""
    return Prompt(guessed_tokens(facts, body_bytes, bytes_per_token) + len(more), (), exact=False, why=why)


def _followed(prompt: Prompt, more: Sequence[int]) -> Prompt:
    return Prompt(prompt.tokens + len(more), prompt.hashes, exact=False, unsplittable=prompt.unsplittable)


def model_in(query: bytes) -> str:
    """The model that a URL's query names; empty when it names none."""
    try:
        found = parse_qs(query.decode("latin-1"), max_num_fields=QUERY_FIELDS_MAX).get("model", [""])
    except ValueError:
        return ""
    return found[-1][:MODEL_CHARS_MAX]


def _only_engines_render(facts: RequestFacts) -> bool:
    """Whether a worker must be asked how its engine reads the prompt."""
    if facts.path in (MESSAGES, RESPONSES):
        return True
    body = facts.body
    return body is not None and facts.path == CHAT and (has_media(body.messages) or not is_plain_chat(body))


def tenant_of(http_request: HttpRequest) -> str:
    """Whose turn the request takes."""
    head = http_request.head
    return head.tenant_of_key()
