"""Engines for the figures of the threads: on this machine's CPUs, one core each, or on NVIDIA GPUs."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from bench import bench_kv_gpu
from bench.kv_bench_fleet import BenchFleet, bench_fleet
from bench.wide_model import make_wide_model
from services.launcher.system.machine import gpus
from services.worker.tiny_model import TINY_MODEL

CACHE = Path.home() / ".cache" / "baton"
CPU_KV_BYTES = 1 << 30
GREEDY = """--override-generation-config '{"temperature": 0}'"""
"""For requests that name no temperature."""
WORD = re.compile("\u0120[a-z]{3,}")
"""Of a byte-level tokenizer: a space, and letters."""
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Engines:
    """Engines that differ in their roles only."""

    settings: Mapping[str, str]
    model_dir: Path
    gpus: tuple[str, ...]
    """Empty: each engine has a core of its own."""
    said: str
    """What they are, for the page."""

    def settings_of(self, role: str, more_args: str = "") -> dict[str, str]:
        """A worker's. ``more_args``: of its engine."""
        args = f"{self.settings.get('engine_args', '')} {more_args}".strip()
        return {**self.settings, "role": role, "engine_args": args}

    @asynccontextmanager
    async def fleet(self, roles: Mapping[str, str], **router: str) -> AsyncIterator[BenchFleet]:
        """Workers by their ids, with a router of these settings."""
        workers = {name: self.settings_of(role) for name, role in roles.items()}
        devices = None
        if self.gpus:
            devices = {
                name: {"CUDA_VISIBLE_DEVICES": self.gpus[number % len(self.gpus)]} for number, name in enumerate(roles)
            }
        async with bench_fleet(workers, router=router, devices=devices) as fleet:
            yield fleet

    async def without_cache(self, fleet: BenchFleet, worker_id: str, successor: str, role: str) -> None:
        """Replace the first worker of a fleet by one without a prefix cache."""
        core = {} if self.gpus else {"cpu_cores": str(min(os.sched_getaffinity(0)))}
        await fleet.replace(worker_id, successor, **self.settings_of(role, "--no-enable-prefix-caching"), **core)


def say_words(model_dir: Path) -> None:
    """Let a model with random weights say whole words only: they become the same tokens again when the text returns in the
    next turn, and none ends an answer.
    """
    vocabulary: dict[str, int] = json.loads((model_dir / "tokenizer.json").read_text())["model"]["vocab"]
    words = [number for token, number in vocabulary.items() if WORD.fullmatch(token)]
    weights = load_file(model_dir / "model.safetensors")
    head = np.zeros_like(weights[HEAD])
    head[words] = weights[HEAD][words]
    save_file({**weights, HEAD: head}, model_dir / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def engines(*, on_gpus: bool) -> Iterator[Engines]:
    """Their model exists until the block ends."""
    common = {"served_model_name": TINY_MODEL, "max_model_len": "16384"}
    with tempfile.TemporaryDirectory() as folder:
        if not on_gpus:
            model_dir = make_wide_model(Path(folder), CACHE)
            say_words(model_dir)
            settings = {**common, "model": str(model_dir), "kv_cache_bytes": str(CPU_KV_BYTES), "engine_args": GREEDY}
            yield Engines(
                settings, model_dir, (), "vLLM's CPU engines, one core each; 32 KB of KV per token, random weights"
            )
            return
        found = tuple(gpus())
        if not found:
            raise SystemExit("nvidia-smi lists no GPU; without GPU=1 this measures CPU engines.")
        model_dir = bench_kv_gpu.make_model(Path(folder))
        settings = {
            **common,
            "model": str(model_dir),
            "kv_cache_bytes": str(bench_kv_gpu.KV_BYTES),
            "engine_args": bench_kv_gpu.ENGINE_ARGS,
        }
        yield Engines(
            settings, model_dir, found, f"{len(found)} GPU(s); a Llama of three billion parameters, random weights"
        )
