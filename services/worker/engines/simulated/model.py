"""The model that a simulated engine pretends to serve, its LoRA adapters, and the engine's facts."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from connector.layout.tensors import PROTOCOL_VERSION
from services.worker.engines.adapters import AdapterFiles
from services.worker.engines.port import EngineFacts
from services.worker.engines.simulated.core.sequence import Sequence
from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.settings import Settings
from services.worker.tiny_model import TINY_MODEL, ensure_tiny_tokenizer, tiny_revision
from shared.contracts.engine_paths import CHAT, COMPLETIONS, RESPONSES
from shared.contracts.workers import ADAPTERS_MAX, Fingerprint, HashScheme

TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


PATHS = frozenset({COMPLETIONS, CHAT, RESPONSES})
"""Of requests that ``SimulatedApp`` serves."""


class SimulatedModel(msgspec.Struct, frozen=True, kw_only=True):
    directory: Path
    """Contains ``tokenizer.json``."""
    names: list[str] = msgspec.field(default_factory=lambda: [TINY_MODEL])
    revision: str = ""


def facts_of(settings: SimulationSettings, model: SimulatedModel, legs_max: int) -> EngineFacts:
    fingerprint = Fingerprint(
        model=model.names[0],
        revision=model.revision,
        dtype="simulated",
        block_size=settings.block_size,
        kv_layout=f"simulated-{settings.sim_kv_bytes_per_token}",
        connector=f"baton-{PROTOCOL_VERSION}/simulated",
        # Block contents are computed with Python's ``hash``, which may differ between versions.
        engine_version=f"simulated-1-python{sys.version_info.major}.{sys.version_info.minor}",
    )
    return EngineFacts(
        engine="simulated",
        models=model.names,
        max_model_len=settings.max_model_len,
        fingerprint=fingerprint,
        hashing=HashScheme(block_size=settings.block_size),
        kv_blocks=settings.kv_blocks,
        legs_max=legs_max,
        step_tokens_max=settings.max_num_batched_tokens,
        prefix_caching=settings.prefix_caching,
        adapters_at_once_max=ADAPTERS_MAX,
        paths=PATHS,
        renders=True,
    )


def models_response(names: list[str], max_model_len: int, adapters: Iterable[str] = ()) -> bytes:
    """The response of /v1/models."""
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


def find_model(settings: Settings, cache_dir: Path) -> tuple[Path, str]:
    """The directory of the model's tokenizer, and the model's revision."""
    if settings.model == TINY_MODEL:
        return ensure_tiny_tokenizer(cache_dir), tiny_revision()
    path = Path(settings.model)
    if path.is_dir():
        return path, str(path.resolve())
    from huggingface_hub import snapshot_download  # Only a model from the hub needs it.

    found = Path(snapshot_download(settings.model, revision=settings.revision or None, allow_patterns=TOKENIZER_FILES))
    return found, found.name


class SimulatedAdapters:
    """An ``AdapterBackend``. Requests that run keep the adapter that they began with."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[str, str]] = {}
        """``RequestParams.lora`` of each loaded adapter."""

    async def enter(self, name: str, files: AdapterFiles) -> str:
        """See the port. The files are needed for their digest only."""
        await asyncio.to_thread(shutil.rmtree, files.folder, ignore_errors=True)
        hashed_as = f"sha256:{files.digest}"
        self.by_name[name] = (name, hashed_as)
        return hashed_as

    async def leave(self, name: str) -> None:
        """See the port."""
        del self.by_name[name]


def adapters_of(sequences: Iterable[Sequence]) -> list[str]:
    """The names of these sequences' adapters."""
    return sorted({sequence.params.lora[0] for sequence in sequences if sequence.params.lora is not None})
