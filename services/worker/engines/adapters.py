"""LoRA adapters of an engine: what may be loaded, and which files an adapter's name stands for.

Each adapter that is loaded gets a copy of its files and a digest of that copy. So what is hashed into KV blocks is what
the engine computes with, even if the files are changed, and the engine reads them again, while it is loaded.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, Protocol

from services.worker.engines.port import EngineAdapters, EngineRefused
from shared.contracts.workers import ADAPTERS_MAX, LoraAdapter

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The first of them that exists is loaded, as in vLLM."""
CONFIG_BYTES_MAX = 1 << 20
WEIGHTS_BYTES_MAX = 16 << 30
PIECE_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
NAME_RULE = "it must have 1 to 128 letters, digits and . _ : / @ + -, and begin with a letter or digit"


class AdapterRefused(Exception):
    """An adapter cannot be loaded or unloaded; the message says why."""


class AdapterFiles(NamedTuple):
    """The private copy of an adapter."""

    folder: Path
    digest: str


class AdapterBackend(Protocol):
    """The part of an engine that runs adapters."""

    async def enter(self, name: str, files: AdapterFiles) -> str:
        """Serve requests for ``name`` with these files from now on, also where it served others before. Owns the files.
        Returns ``LoraAdapter.hashed_as``. Raises AdapterRefused.
        """

    async def leave(self, name: str) -> None:
        """Take no further requests for it; running ones may end."""


class LoadedAdapters:
    """An ``EngineAdapters``. ``models``: names that no adapter may have. ``folder``: for copies."""

    def __init__(self, backend: AdapterBackend, models: Collection[str], folder: Path) -> None:
        self._backend = backend
        self._models = models
        self._folder = folder
        self._by_name: dict[str, LoraAdapter] = {}
        self._changing = asyncio.Lock()

    @property
    def loaded(self) -> list[LoraAdapter]:
        return list(self._by_name.values())

    async def load(self, name: str, source: Path, within: Path | None = None) -> LoraAdapter:
        self._check_name(name)
        async with self._changing:
            if name not in self._by_name and len(self._by_name) >= ADAPTERS_MAX:
                raise AdapterRefused(f"{ADAPTERS_MAX} adapters are loaded, the maximum: unload one first")
            files = await asyncio.to_thread(copy_adapter, source, self._folder, within)
            known = self._by_name.get(name)
            if known is not None and known.digest == files.digest:
                await asyncio.to_thread(shutil.rmtree, files.folder, ignore_errors=True)
                return known
            hashed_as = await self._backend.enter(name, files)
            adapter = self._by_name[name] = LoraAdapter(name=name, digest=files.digest, hashed_as=hashed_as)
            return adapter

    def _check_name(self, name: str) -> None:
        """Raises AdapterRefused."""
        if not NAME.fullmatch(name):
            raise AdapterRefused(f"{name[:128]!r} is no name for an adapter: {NAME_RULE}")
        if name in self._models:
            raise AdapterRefused(f"{name} is a name of the model itself")

    async def unload(self, name: str) -> None:
        async with self._changing:
            if name not in self._by_name:
                raise AdapterRefused(f"no adapter {name[:128]!r} is loaded")
            await self._backend.leave(name)
            del self._by_name[name]


def folder_within(lora_dir: str, path: str) -> Path:
    """The folder ``path``, absolute or relative to ``lora_dir``, which must lie in that directory when all symbolic
    links are followed. Raises AdapterRefused.
    """
    if not lora_dir:
        raise AdapterRefused("it loads no adapters at run time: start it with WORKER_LORA_DIR, a folder of adapters")
    if "\0" in path:
        raise AdapterRefused("the path contains a null character")
    base = Path(lora_dir).resolve()
    try:
        folder = (base / path).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise AdapterRefused(f"{path} cannot be found in WORKER_LORA_DIR: {_reason(error)}") from None
    if not folder.is_relative_to(base) or not folder.is_dir():
        raise AdapterRefused(f"{path} is no folder in WORKER_LORA_DIR, the only place that adapters are loaded from")
    return folder


def copy_adapter(
    source: Path, into: Path, within: Path | None = None, *, bytes_max: int = WEIGHTS_BYTES_MAX
) -> AdapterFiles:
    """Copy the adapter's files into a new folder below ``into`` and hash the copy. With ``within``, files elsewhere, to
    which the adapter has links, are refused. ``bytes_max``: of its weights. Blocks. Raises AdapterRefused.
    """
    names = [CONFIG, next((name for name in WEIGHTS if (source / name).exists()), WEIGHTS[0])]
    digest, folder = hashlib.sha256(), Path(tempfile.mkdtemp(prefix="adapter-", dir=into))
    try:
        for name, most in zip(names, (CONFIG_BYTES_MAX, bytes_max), strict=True):
            digest.update(f"{name}\0".encode() + _copy(source / name, folder / name, most, within))
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, (OSError, RuntimeError)):
            raise AdapterRefused(f"{source} cannot be read as an adapter: {name}: {_reason(error)}") from None
        raise
    return AdapterFiles(folder, digest.hexdigest())


def _copy(source: Path, target: Path, bytes_max: int, within: Path | None) -> bytes:
    """Returns the SHA-256 of what was copied."""
    file = source.resolve(strict=True)
    if within is not None and not file.is_relative_to(within.resolve()):
        raise AdapterRefused(f"{source.name} is a link to a file outside of WORKER_LORA_DIR")
    digest, copied = hashlib.sha256(), 0
    # A pipe or a device must not be waited for.
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(opened, "rb") as read, target.open("wb") as write:
        if not stat.S_ISREG(os.fstat(read.fileno()).st_mode):
            raise AdapterRefused(f"{source.name} is no regular file")
        while piece := read.read(PIECE_BYTES):
            copied += len(piece)
            if copied > bytes_max:
                raise AdapterRefused(f"{source.name} has more than {bytes_max} bytes, the maximum")
            digest.update(piece)
            write.write(piece)
    return digest.digest()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def parse_adapters(text: str) -> dict[str, str]:
    """``name=path`` pairs, separated by spaces or commas. Raises ValueError."""
    adapters: dict[str, str] = {}
    for pair in text.replace(",", " ").split():
        name, _, path = pair.partition("=")
        if not name or not path or name in adapters:
            raise ValueError(f"WORKER_LORA_ADAPTERS: {pair!r} is not name=path, or its name is there twice")
        adapters[name] = path
    return adapters


async def load_at_start(adapters: EngineAdapters | None, text: str, lora_dir: str) -> None:
    """Load the adapters of WORKER_LORA_ADAPTERS. Raises EngineRefused."""
    try:
        for name, path in parse_adapters(text).items():
            if adapters is None:
                raise AdapterRefused("this engine was started without LoRA")
            await adapters.load(name, Path(lora_dir) / path)
    except (AdapterRefused, ValueError) as refused:
        raise EngineRefused(f"An adapter cannot be loaded: {refused}") from None
