"""The model that a simulated engine pretends to serve: its facts, its LoRA adapters and its tokenizer."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from connector.layout.tensors import PROTOCOL_VERSION
from services.worker.engines.adapters import AdapterFiles
from services.worker.engines.port import EngineFacts, TokenizerFiles
from services.worker.engines.simulated.core.batch import Sequence
from services.worker.engines.simulated.core.engine_core import ModelTokens
from services.worker.engines.simulated.core.groups import hash_scheme
from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.settings import Settings
from services.worker.tiny_model import TINY_MODEL, ensure_tiny_tokenizer, tiny_revision
from shared.contracts.engine_paths import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from shared.contracts.request_body import joined
from shared.contracts.workers import ADAPTERS_MAX, USUAL_BACKEND, Fingerprint, with_backend
from shared.third_party import CONTAINED

TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


PATHS = frozenset({COMPLETIONS, CHAT, RESPONSES, MESSAGES})
"""Paths that ``SimulatedApp`` serves."""


class SimulatedModel(msgspec.Struct, frozen=True, kw_only=True):
    directory: Path
    """Contains ``tokenizer.json``."""
    names: list[str] = msgspec.field(default_factory=lambda: [TINY_MODEL])
    revision: str = ""


def facts_of(settings: SimulationSettings, model: SimulatedModel, legs_max: int) -> EngineFacts:
    others, block_bytes = settings.other_groups, settings.block_size * settings.kv_bytes_per_token
    fingerprint = Fingerprint(
        model=model.names[0],
        revision=model.revision,
        dtype="simulated",
        block_size=settings.block_size,
        kv_layout=f"simulated-{settings.groups}-{settings.kv_bytes_per_token}",
        connector=with_backend(
            f"baton-{PROTOCOL_VERSION}/simulated", settings.kv_backend if settings.transfer == "nixl" else USUAL_BACKEND
        ),
        # Block contents are computed with Python's ``hash``, which may differ between versions.
        engine_version=f"simulated-1-python{sys.version_info.major}.{sys.version_info.minor}",
    )
    return EngineFacts(
        engine="simulated",
        models=model.names,
        max_model_len=settings.max_model_len,
        fingerprint=fingerprint,
        hashing=hash_scheme(settings.groups, settings.block_size),
        kv_tokens=settings.kv_blocks * settings.block_size,
        legs_max=legs_max,
        step_tokens_max=settings.max_num_batched_tokens,
        prefix_caching=settings.prefix_caching,
        adapters_at_once_max=ADAPTERS_MAX,
        paths=PATHS,
        renders=True,
        kv_token_bytes=settings.kv_bytes_per_token,
        kv_boundary_bytes=others.blocks_max * block_bytes if others is not None else 0,
    )


def models_response(names: list[str], max_model_len: int, adapters: Iterable[str] = ()) -> bytes:
    created = int(time.time())
    cards = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "baton",
            "root": names[0],
            "parent": parent,
            "max_model_len": max_model_len,
        }
        for name, parent in (*((name, None) for name in names), *((name, names[0]) for name in adapters))
    ]
    return msgspec.json.encode({"object": "list", "data": cards})


class NoTokenizer(Exception):
    """The model's tokenizer cannot be had; the message says why and what to do."""


def find_model(settings: Settings, cache_dir: Path) -> tuple[Path, str]:
    """The directory of the model's tokenizer, and the model's revision. Raises NoTokenizer."""
    if settings.model == TINY_MODEL:
        return ensure_tiny_tokenizer(cache_dir), tiny_revision()
    path = Path(settings.model)
    if path.is_dir():
        return path, str(path.resolve())
    from huggingface_hub import snapshot_download  # Only a model from the hub needs it.

    try:
        folder = snapshot_download(settings.model, revision=settings.revision or None, allow_patterns=TOKENIZER_FILES)
    except (OSError, ValueError) as error:  # No network, no such model, no name that a model can have.
        why = str(error).splitlines()[0].rstrip(".")
        raise NoTokenizer(
            f"A simulated engine needs the tokenizer of {settings.model}: no folder has this name, and Hugging Face "
            f"does not have it or cannot be reached ({why}). {TINY_MODEL} needs no network."
        ) from error
    found = Path(folder)
    return found, found.name


class SimulatedAdapters:
    """An ``AdapterBackend``. Requests that run keep the adapter that they began with."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[str, str]] = {}
        """``RequestParams.adapter`` of each loaded adapter."""

    async def enter(self, name: str, files: AdapterFiles) -> str:
        """See the port. The files are needed for their digest only."""
        await asyncio.to_thread(shutil.rmtree, files.folder, ignore_errors=True)
        hashed_as = f"sha256:{files.digest}"
        self.by_name[name] = (name, hashed_as)
        return hashed_as

    async def leave(self, name: str) -> None:
        del self.by_name[name]


def adapters_of(sequences: Iterable[Sequence]) -> list[str]:
    return sorted({sequence.params.adapter[0] for sequence in sequences if sequence.params.adapter is not None})


SAYABLE_MIN = 64
"""If the vocabulary has fewer whole words, the model generates any token that decodes to text by itself."""
CHARS_MAX = 16 * 1024 * 1024
"""Maximum length of a rendered chat."""
PARTS_WALKED = re.compile(r"for\s+\w+\s+in\s+\w+(\.content|\[\s*['\"]content['\"]\s*\])")
"""Matches templates that iterate over a message's content. They get it as a list of parts; other templates get one
string, as vLLM gives it to them.
"""


class ChatTemplateFailed(Exception):
    """The model's chat template cannot render these messages; the message says why."""


class SimulatedTokenizer:
    """Reads ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` of a model directory, without the
    transformers library.

    A simulated model generates tokens that are a space and a word. Their text does not depend on their neighbours, and
    a completion that a client sends back is tokenised into the same tokens, as is mostly so with real models.
    """

    def __init__(self, directory: Path) -> None:
        self._json = (directory / "tokenizer.json").read_bytes()
        self._tokenizer = Tokenizer.from_str(self._json.decode())
        self._tokenizer.no_truncation()
        config = _read_json(directory / "tokenizer_config.json")
        self._special = _special_tokens(config)
        self._template_source = _template_source(directory, config)
        self._template = _environment().from_string(self._template_source) if self._template_source else None
        self._as_parts = PARTS_WALKED.search(self._template_source) is not None
        words = self._words()
        self.texts: dict[int, str] = words
        """Text of each token that the model may generate."""
        eos = self._special.get("eos_token")
        self.model = ModelTokens(
            size=self._tokenizer.get_vocab_size(),
            sayable=sorted(words),
            eos=None if eos is None else self._tokenizer.token_to_id(eos),
        )

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids; ``special``: add the special tokens that the tokenizer puts around a prompt."""
        with CONTAINED:
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of the tokens, without special ones."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def render_chat(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The prompt for a chat. Raises ChatTemplateFailed."""
        if self._template is None:
            raise ChatTemplateFailed("The model has no chat template.")
        given = messages if self._as_parts else list(map(_content_as_text, messages))
        try:
            return self._template.render(messages=given, **self._special, **variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatTemplateFailed(f"The chat template failed: {error}") from error

    def files(self) -> TokenizerFiles:
        """Files from which a router makes the same tokens."""
        return TokenizerFiles(
            tokenizer_json=self._json,
            chat_template=self._template_source,
            special_tokens=self._special,
            adds_special_tokens=True,
        )

    def _words(self) -> dict[int, str]:
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        texts = dict(self._texts(i for i in range(self._tokenizer.get_vocab_size()) if i not in special))
        words = {i: text for i, text in texts.items() if text[0] == " " and text[1:].isalpha()}
        encoded = self._tokenizer.encode_batch_fast(list(words.values()), add_special_tokens=False)
        stable = {i: text for (i, text), again in zip(words.items(), encoded, strict=True) if again.ids == [i]}
        return stable if len(stable) >= SAYABLE_MIN else texts

    def _texts(self, ids: Iterable[int]) -> Iterable[tuple[int, str]]:
        """Ids with the text that they add after another token. Leaves out tokens that are a part of a character."""
        anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        before = self._tokenizer.decode(anchor)
        for i in ids:
            text = self._tokenizer.decode([*anchor, i])[len(before) :]
            if text and "\ufffd" not in text:
                yield i, text


def _content_as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    return message | {"content": "\n".join(text for text in texts if isinstance(text, str))}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Names such as ``bos_token``, whose values are strings or, in older files, objects."""
    special = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            special[name] = content
    return special


def _template_source(directory: Path, config: dict[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return str(named.get("default", ""))
    return str(template)


class _Sandbox(ImmutableSandboxedEnvironment):
    def concat(self, pieces: Iterable[str]) -> str:
        """How jinja2 joins the pieces of a template."""
        return joined(pieces, CHARS_MAX)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment as transformers configures it, since templates are written for that."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
