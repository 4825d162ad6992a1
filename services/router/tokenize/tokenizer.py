"""From a request's text to its block hashes, with the engine's own tokenizer and chat template.

Nothing here validates or fails a request: for a prompt that cannot be rendered and tokenized exactly as the engine
does, the result is None, and the request is placed by load alone.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from tokenizers import Tokenizer

from services.router.request.facts import Body, RequestFacts
from services.router.request.fields import TOO_LONG, given
from services.router.request.prompt import Prompt
from services.router.tokenize.block_hash import ALGORITHMS, NO_KEYS, HashKeys, extend_chain, goes_on
from services.router.tokenize.chat_messages import Message, Part
from services.router.tokenize.chat_template import ROUNDS_MAX, ChatTemplate, TemplateFailed, TooManyRounds
from services.router.tokenize.linear import is_linear
from services.router.tokenize.segments import PieceTooLong, Segments, TokenizerFailed, Walk
from services.router.tokenize.turns import Work
from shared.contracts.control import TokenizerAsset
from shared.contracts.engine_paths import CHAT, COMPLETIONS, FORMS
from shared.contracts.request_body import PROMPT_CHARS_MIN
from shared.contracts.workers import HashScheme
from shared.fair_slots import NoTurn
from shared.third_party import CONTAINED, LibraryFailed

BYTES_PER_TOKEN_GUESSED: Final = 4.0
BYTES_PER_TOKEN_OF_AUDIO: Final = 1000.0
TOKEN_IDS: Final = re.compile(rb"\s*\[\s*[0-9]")
"""The beginning of one prompt of token ids, as JSON."""
"""Compressed speech has 4 to 16 kB a second, of which models make 10 to 50 tokens."""
TOKENIZE_S_MAX: Final = 1.0
"""A prompt that the thread has not tokenized within this time, waiting included, is placed by load alone."""
HASHED_AT_ONCE: Final = 4096
"""Token ids that are hashed between two checks whether any worker holds their blocks."""
READ_ON_LOOP_BYTES: Final = 64 * 1024
"""Maximum size of a prompt's JSON that is read on the event loop."""
ROUNDS_ON_LOOP: Final = 512
"""Maximum number of rounds of a rendering on the event loop: half a millisecond."""
STEP_CHARS: Final = 8 * 1024
"""Characters tokenized in one step of the quick thread. A longer piece that cannot be cut goes to the slow one."""

TEXT_ITERATED: Final = re.compile(r"for\s+\w+\s+in\s+\w+(\.content|\[\s*['\"]content['\"]\s*\])")
"""A template that iterates over a message's content expects a list of parts."""


TEXT_OR_TOKEN_IDS: Final = msgspec.json.Decoder(str | list[int])
TOKEN_ID_LIST: Final = msgspec.json.Decoder(list[int])
MESSAGES: Final = msgspec.json.Decoder(list[Message])


class NotExact(Exception):
    """The router cannot render this prompt exactly as the engine does."""


NOT_EXACT: Final = (
    NotExact,
    msgspec.DecodeError,
    UnicodeError,
    TemplateFailed,
    TooManyRounds,
    PieceTooLong,
    TokenizerFailed,
    ValueError,
    OverflowError,
    RecursionError,
    struct.error,
    LibraryFailed,
)
"""Errors of an invalid or too costly prompt; the engine reports them to the client."""
Adapter = tuple[str, str]
Held = Callable[[int], bool]
"""Whether any worker holds a block."""


class Text(NamedTuple):
    """A prompt as text."""

    text: str
    special: bool
    """Whether the tokenizer adds its special tokens."""


class BegunText(NamedTuple):
    """A text whose beginning is tokenized."""

    walk: Walk
    chars: int
    """The result of ``Segments.advance``: 0 when no more of it is needed."""


class Unfinished(NamedTuple):
    """A prompt whose tokenization takes too long for the event loop."""

    facts: RequestFacts
    read: BegunText | list[int] | None
    """What is read of the prompt; None when even reading it takes too long."""
    keys: HashKeys
    more: Sequence[int]


def guessed_tokens(facts: RequestFacts, body_bytes: int, bytes_per_token: float = BYTES_PER_TOKEN_GUESSED) -> int:
    """An estimate of a prompt's tokens, without tokenizing it; exact for one list of token ids."""
    body = facts.body
    size = prompt_bytes(body) if body is not None else 0
    if body is not None and TOKEN_IDS.match(body.prompt) is not None:
        return bytes(body.prompt).count(b",") + 1
    bytes_per_token = BYTES_PER_TOKEN_OF_AUDIO if facts.path in FORMS else bytes_per_token
    return int((size or body_bytes) / bytes_per_token) + 1


def is_quick(chars: int) -> bool:
    """Whether a text continues with a piece of ``chars`` characters that the quick thread may tokenize."""
    return 0 < chars <= STEP_CHARS


def prompt_bytes(body: Body) -> int:
    """Size of the prompt as JSON."""
    return len(body.prompt) + len(body.messages) + len(body.input)


class TokenIds:
    """Prompts of token ids: their block hashes take no tokenizer. Raises ValueError for hashes that the router does not
    compute.
    """

    def __init__(self, scheme: HashScheme) -> None:
        if scheme.algorithm not in ALGORITHMS:
            raise ValueError(f"block hashes of {scheme.algorithm} cannot be followed")
        self.chars_per_token = BYTES_PER_TOKEN_GUESSED
        self._scheme = scheme

    def begin(self, facts: RequestFacts, more: Sequence[int], adapter: Adapter | None) -> Prompt | Unfinished | None:
        """See ``PromptTokenizer.begin``. None when the engine will refuse the prompt."""
        body = facts.body
        if body is None or not isinstance(body.cache_salt, str | None):
            return None
        keys = HashKeys(body.cache_salt or "", adapter) if body.cache_salt or adapter else NO_KEYS
        if prompt_bytes(body) > READ_ON_LOOP_BYTES:
            return Unfinished(facts, None, keys, more)
        try:
            return self.hashed_at_once(facts, TOKEN_ID_LIST.decode(body.prompt), keys, more)
        except NOT_EXACT:
            return None

    def hashed_at_once(
        self, facts: RequestFacts, ids: list[int], keys: HashKeys, more: Sequence[int]
    ) -> Prompt | Unfinished:
        """Raises all of ``NOT_EXACT``."""
        if len(ids) > HASHED_AT_ONCE:
            return Unfinished(facts, ids, keys, more)
        tokens = [*ids, *more]
        hashes, _digest = extend_chain(None, tokens, self._scheme, salt=keys.salt, adapter=keys.adapter)
        return Prompt(len(tokens), hashes, exact=True)

    async def finish(self, begun: Unfinished, held: Held, work: Work) -> Prompt | None:
        """See ``PromptTokenizer.finish``."""
        facts, read, keys, more = begun
        body = facts.body
        assert body is not None
        ids = read if isinstance(read, list) else None
        try:
            async with work.within(TOKENIZE_S_MAX):
                if ids is None:
                    ids = await work.run(partial(TOKEN_ID_LIST.decode, body.prompt), slow=True)
                return await self.hashed([*ids, *more], keys, held, work)
        except (TimeoutError, *NOT_EXACT, NoTurn):
            return None

    async def hashed(self, tokens: list[int], keys: HashKeys, held: Held, work: Work) -> Prompt:
        """In a thread, up to the first block that is not ``held``. Raises all of ``NOT_EXACT``."""
        at_once = HASHED_AT_ONCE - HASHED_AT_ONCE % self._scheme.block_size or self._scheme.block_size
        hashes: list[int] = []
        digest: bytes | None = None
        at = 0

        def hash_some() -> bool:
            """Returns whether there is more to hash."""
            nonlocal digest, at
            found, digest = extend_chain(
                digest, tokens[at : at + at_once], self._scheme, salt=keys.salt, adapter=keys.adapter
            )
            hashes.extend(found)
            at += at_once
            return at < len(tokens) and goes_on(hashes, self._scheme.stride, held)

        while await work.run(hash_some, again=bool):
            pass
        return Prompt(len(tokens), hashes, exact=True)


class PromptTokenizer:
    """From one model's request bodies to block hashes. ``chars_max``: of a rendered chat. Raises ValueError when the
    asset cannot be used.
    """

    def __init__(
        self, asset: TokenizerAsset, scheme: HashScheme, *, cache_bytes_max: int, chars_max: int = PROMPT_CHARS_MIN
    ) -> None:
        if not asset.tokenizer_json:
            raise ValueError(asset.note or "the model has no tokenizer.json")
        self._ids = TokenIds(scheme)
        self._adds_special_tokens = asset.adds_special_tokens
        self._template = _compiled(asset, chars_max)
        self._as_parts = TEXT_ITERATED.search(asset.chat_template) is not None
        try:
            with CONTAINED:
                tokenizer = Tokenizer.from_str(asset.tokenizer_json.decode())
                self._is_linear = is_linear(tokenizer)
                self._segments = Segments(
                    tokenizer, scheme, cache_bytes_max=cache_bytes_max, hint=self._example(asset.special_tokens)
                )
        except Exception as error:  # tokenizers raises plain Exception for all that it cannot read
            raise ValueError(f"tokenizer.json cannot be used: {error}") from error

    @property
    def failure(self) -> str:
        """Why its texts are no longer tokenized; empty while they are."""
        return self._segments.failure

    @property
    def chars_per_token(self) -> float:
        """Mean of the text that was tokenized so far."""
        return self._segments.chars_per_token

    def whole_prompt(self, facts: RequestFacts, adapter: Adapter | None = None) -> Prompt | None:
        """All of its hashes, however long that takes; None when they cannot be known exactly. ``adapter``: see
        ``HashKeys``.
        """
        body = facts.body
        if body is None:
            return None
        try:
            keys = HashKeys(body.cache_salt or "", adapter)
            text = self._read(facts.path, body)
            return self.tokenize(text.text, special=text.special, keys=keys) if isinstance(text, Text) else None
        except NOT_EXACT:
            return None

    def tokenize(self, text: str, *, special: bool = False, keys: HashKeys = NO_KEYS) -> Prompt:
        """All hashes of a text. Raises all of ``NOT_EXACT``."""
        walk = self._segments.begin(text, special=special, keys=keys)
        while self._segments.advance(walk, lambda _block: True, sys.maxsize):
            pass
        return self._segments.prompt(walk)

    async def prompt(
        self,
        facts: RequestFacts,
        held: Held,
        *,
        work: Work,
        loop_chars_max: int,
        more: Sequence[int] = (),
        adapter: Adapter | None = None,
    ) -> Prompt | None:
        """Its length, and its block hashes as far as ``held`` knows them; None when they cannot be known exactly, or
        not within ``TOKENIZE_S_MAX``. ``more``: tokens that follow it. ``adapter``: see ``HashKeys``.
        """
        begun = self.begin(facts, held, loop_chars_max=loop_chars_max, more=more, adapter=adapter)
        return await self.finish(begun, held, work) if isinstance(begun, Unfinished) else begun

    def begin(
        self,
        facts: RequestFacts,
        held: Held,
        *,
        loop_chars_max: int,
        more: Sequence[int] = (),
        adapter: Adapter | None = None,
    ) -> Prompt | Unfinished | None:
        """As ``prompt``, for what takes less than a millisecond; ``finish`` does the rest of a longer one."""
        body = facts.body
        if body is None or body.truncate_prompt_tokens is not None or not isinstance(body.cache_salt, str | None):
            return None
        text_chars_max = loop_chars_max if self._is_linear else 0
        keys = HashKeys(body.cache_salt or "", adapter) if body.cache_salt or adapter else NO_KEYS
        try:
            read = self._read_on_loop(facts.path, body, max(READ_ON_LOOP_BYTES, loop_chars_max))
            if isinstance(read, Text):
                begun = self._begin_text(read, keys, held, text_chars_max)
                if begun.chars:
                    return Unfinished(facts, begun, keys, more)
                return self._segments.prompt(begun.walk, more)
            if read is not None:
                return self._ids.hashed_at_once(facts, read, keys, more)
        except NOT_EXACT:
            return None
        return Unfinished(facts, None, keys, more)

    async def finish(self, begun: Unfinished, held: Held, work: Work) -> Prompt | None:
        """The rest of ``begin``, in a thread."""
        facts, read, keys, more = begun
        body = facts.body
        assert body is not None

        def read_and_begin() -> BegunText | list[int]:
            found = self._read(facts.path, body, stopped=work.is_stopped)
            chars_max = STEP_CHARS if self._is_linear else 0
            return self._begin_text(found, keys, held, chars_max) if isinstance(found, Text) else found

        try:
            async with work.within(TOKENIZE_S_MAX):
                if read is None:
                    read = await work.run(read_and_begin, slow=prompt_bytes(body) > READ_ON_LOOP_BYTES)
                if isinstance(read, BegunText):
                    work.hold(sys.getsizeof(read.walk.text))
                    return await self._prompt_of_text(read, held, work, more)
                return await self._ids.hashed([*read, *more], keys, held, work)
        except TimeoutError:
            self._segments.give_up_stuck()
            return None
        except (*NOT_EXACT, NoTurn):
            return None

    def _begin_text(self, text: Text, keys: HashKeys, held: Held, chars_max: int) -> BegunText:
        walk = self._segments.begin(text.text, special=text.special, keys=keys)
        return BegunText(walk, self._segments.advance(walk, held, chars_max))

    async def _prompt_of_text(self, begun: BegunText, held: Held, work: Work, more: Sequence[int]) -> Prompt:
        walk, chars = begun
        advance = self._segments.advance
        while chars:
            if chars > STEP_CHARS or not self._is_linear:
                chars = await work.run(partial(advance, walk, held, max(chars, STEP_CHARS)), slow=True)
            else:
                chars = await work.run(partial(advance, walk, held, STEP_CHARS), again=is_quick)
        return self._segments.prompt(walk, more)

    def _example(self, special_tokens: Mapping[str, str]) -> str:
        """An example chat with the tokens between messages."""
        shown = " ".join(special_tokens.values())
        for system in ([{"role": "system", "content": "s"}], []):
            turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
            try:
                if self._template is not None:
                    shown += self._template.render(system + turns, {"add_generation_prompt": True})
            except (TemplateFailed, TooManyRounds):
                continue
        return shown

    def _read_on_loop(self, path: str, body: Body, bytes_max: int) -> Text | list[int] | None:
        """None when that would take long."""
        if prompt_bytes(body) > bytes_max:
            return None
        try:
            return self._read(path, body, rounds_max=ROUNDS_ON_LOOP)
        except TooManyRounds:
            return None

    def _read(
        self, path: str, body: Body, *, rounds_max: int = ROUNDS_MAX, stopped: Callable[[], bool] = lambda: False
    ) -> Text | list[int]:
        """Raises all of ``NOT_EXACT``."""
        if path == COMPLETIONS:
            special = self._adds_special_tokens if body.add_special_tokens is None else body.add_special_tokens is True
            prompt = TEXT_OR_TOKEN_IDS.decode(body.prompt)
            return Text(prompt, special) if isinstance(prompt, str) else prompt
        if path != CHAT or self._template is None or not is_plain_chat(body):
            raise NotExact
        messages = conversation(MESSAGES.decode(body.messages), as_parts=self._as_parts)
        variables = _template_variables(body)
        rendered = self._template.render(messages, variables, rounds_max=rounds_max, stopped=stopped)
        return Text(rendered, body.add_special_tokens is True)


def _compiled(asset: TokenizerAsset, chars_max: int) -> ChatTemplate | None:
    """None when there is no template, or none that compiles: then only chats are placed by load alone."""
    if not asset.chat_template:
        return None
    try:
        return ChatTemplate(asset.chat_template, asset.special_tokens, chars_max=chars_max)
    except TemplateFailed:
        return None


def conversation(messages: list[Message], *, as_parts: bool) -> list[dict[str, Any]]:
    """Messages as vLLM passes them to the template. Raises NotExact for content that only the engine understands."""
    made: list[dict[str, Any]] = []
    for message in messages:
        if message.role in ("developer", "tool") or given(message.tool_calls) or given(message.reasoning):
            raise NotExact
        texts = _texts(message.content)
        parts = [{"type": "text", "text": text} for text in texts]
        one: dict[str, Any] = {"role": message.role, "content": parts if as_parts else "\n".join(texts)}
        if isinstance(message.name, str):
            one["name"] = message.name
        made.append(one)
    return made


def _texts(content: str | list[str | Part] | None) -> list[str]:
    if isinstance(content, str):
        return [content]
    if content is None:
        raise NotExact
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.text if part.type == "text" else None
        if text is None:
            raise NotExact
        texts.append(text)
    return texts


def is_plain_chat(body: Body) -> bool:
    """Whether the template sees nothing but plain messages."""
    simple = body.chat_template is None and body.continue_final_message in (None, False)
    simple = simple and body.reasoning_effort is not TOO_LONG
    kwargs = body.chat_template_kwargs
    return simple and not given(body.tools) and not given(body.documents) and (kwargs is None or type(kwargs) is dict)


def _template_variables(body: Body) -> dict[str, Any]:
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    variables["add_generation_prompt"] = body.add_generation_prompt is not False
    return variables
