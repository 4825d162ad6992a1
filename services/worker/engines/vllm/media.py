"""Media in vLLM's server: only vLLM itself fetches them, and its caches of what it has processed keep tenants apart.

It fetches from the hosts of ``--allowed-media-domains`` only (see ``arguments``), whatever the endpoint: every other
URL is 400.

vLLM knows a medium by the ``uuid`` that the client gives to it, or else by a hash of its content, and puts either into
the hashes of KV blocks. A client could choose the name, or the hash, of another tenant's medium: that tenant's requests
would then be answered for the client's own picture. It could also see by the time of an answer whether another tenant
has used a picture.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, NoReturn

from services.worker.engines.port import CURRENT_LEG, LegInput

NAME_BYTES = 32
MODALITIES = ("audio", "image", "video")
SALT = "cache_salt"
OTHER_READERS = {
    "mistral_common.tokens.tokenizers.image": ("download_image", "open"),
    "mistral_common.tokens.tokenizers.audio": ("Audio.from_url", "Audio.from_file"),
    "transformers.tokenization_mistral_common": ("load_audio_as",),
}
"""Functions, by module, with which Mistral's tokenizer reads URLs and files of messages, after vLLM has read them:
without vLLM's rules, with redirects, and in fields that vLLM ignores (``path`` and ``url`` of a part)."""


def only_vllm_reads_media() -> None:
    """From now on Mistral's tokenizer, if this engine uses it, reads media from ``data:`` URLs only."""
    if "mistral_common" not in sys.modules:  # Its import takes seconds.
        return
    for name, readers in OTHER_READERS.items():
        module = importlib.import_module(name)
        for reader in readers:
            owner, _, function = reader.rpartition(".")
            setattr(getattr(module, owner) if owner else module, function, _refuse)


def refuse_files() -> None:
    """From now on a ``file:`` URL is 400, unless the operator has set ``--allowed-local-media-path``. VLLM's server
    raises RuntimeError for it, which routers take for a failure of the worker.
    """
    from vllm.multimodal.media import MediaConnector

    load = MediaConnector._load_file_url

    @functools.wraps(load)
    def load_file(connector: Any, *args: Any) -> Any:
        if connector.allowed_local_media_path is None:
            raise ValueError("media must be `data:` URLs, not files")
        return load(connector, *args)

    MediaConnector._load_file_url = load_file


def _refuse(*_args: Any, **_options: Any) -> NoReturn:
    raise ValueError("media for this model must be `data:` URLs")


def separate_tenants(renderer: Any) -> None:
    """From now on this renderer hashes the salts of the current leg into the names of media, and keeps media that are
    only rendered in a cache of their own.

    All of vLLM's endpoints pass media through these two functions, the second of which runs the first in a thread.
    """
    renderer._process_multimodal = _salting(renderer._process_multimodal)
    renderer._process_multimodal_async = _salting(renderer._process_multimodal_async)


def name_by_content(renderer: Any, revision: str) -> None:
    """From now on ``revision`` is hashed into the names of media in the place of the model's path: paths differ between
    machines, whose workers would not find each other's KV of an image.
    """
    if renderer.mm_processor is None:
        return
    info = renderer.mm_processor.info
    info.__class__ = type(type(info).__name__, (type(info),), {"model_id": revision})


def _salting(process: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(process)
    def salted(prompt: Any, media: Any, *, mm_uuids: Any, media_io_kwargs: Any, **options: Any) -> Any:
        leg = CURRENT_LEG.get()
        given = leg.input if leg is not None else LegInput()
        if given.media_salt:
            mm_uuids = salted_names(mm_uuids, given.media_salt)
        if given.cache_salt:
            media_io_kwargs = salted_factors(media_io_kwargs, given.cache_salt)
        if given.rendered is not None:
            # What vLLM's usual cache of processed media has, vLLM does not send to the engine again.
            options["skip_mm_cache"] = True
        return process(prompt, media, mm_uuids=mm_uuids, media_io_kwargs=media_io_kwargs, **options)

    return salted


def salted_names(uuids: Mapping[str, Any] | None, salt: str) -> dict[str, Any] | None:
    """The client's names of media, by modality: a name, or a list of names, with None where it gave none."""
    if uuids is None:
        return None
    key = salt.encode()[: blake2b.MAX_KEY_SIZE]

    def one(name: str | None) -> str | None:
        if name is None:
            return None
        return blake2b(name.encode(errors="surrogatepass"), key=key, digest_size=NAME_BYTES).hexdigest()

    return {kind: one(given) if isinstance(given, str) else [*map(one, given)] for kind, given in uuids.items()}


def salted_factors(factors: Mapping[str, Any] | None, salt: str) -> dict[str, Any]:
    """The options of reading media, which at this point vLLM only hashes into the names of media, with the salt."""
    given = factors or {}
    return {**given, **{kind: {**(given.get(kind) or {}), SALT: salt} for kind in MODALITIES}}
