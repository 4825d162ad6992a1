"""Handoffs between engines on one NVIDIA GPU or two, beside vLLM's connector: ``python -m bench.bench_kv_gpu``.

The model has the shape of a Llama of three billion parameters, and random weights that vLLM makes itself. Prefill engines run on the
first GPU, decode engines on the second if there is one. Writes docs/benchmarks/kv-gpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from contextlib import closing
from pathlib import Path

from bench import bench_kv_handoff as handoffs
from bench import plain_reads
from bench.bench_kv_handoff import OFFERED, STREAMED, UPSTREAM
from bench.kv_bench_fleet import bench_fleet
from bench.kv_bench_page import Measured, commit, measuring, page
from bench.kv_handoff_tables import Work, handoff_lines, physics_lines
from bench.plain_reads import PlainReader
from services.launcher.system.machine import gpus, nvidia_smi
from services.worker.tiny_model import ensure_tiny_model

CACHE = Path.home() / ".cache" / "baton"
LAYERS, KV_HEADS, HEAD_DIM, VALUE_BYTES = 28, 8, 128, 2
SHAPE = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 24,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "dtype": "bfloat16",
}
WORK = Work(
    LAYERS * 2 * KV_HEADS * HEAD_DIM * VALUE_BYTES, chunk=2048, others="upstream's engines are idle beside them"
)
ENGINE_ARGS = (
    f"--load-format dummy --max-num-batched-tokens {WORK.chunk} --max-num-seqs 16 --gpu-memory-utilization 0.2"
)
"""Four engines share a GPU."""
KV_BYTES = 8 << 30
TIMES = {64: 12, 512: 12, 2048: 12, 8192: 8}
QUICK = dict.fromkeys(TIMES, 3)


def make_model(folder: Path) -> Path:
    """The directory of the model: baton-tiny's tokenizer and another shape."""
    model = folder / "llama-3b"
    shutil.copytree(ensure_tiny_model(CACHE), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **SHAPE}))
    return model


async def measure(times: dict[int, int], engine_args: str) -> list[str]:
    """All tables."""
    found_gpus = gpus()
    if not found_gpus:
        raise SystemExit("nvidia-smi lists no GPU; `make bench-kv` measures handoffs between CPU engines.")
    devices = {
        name: {"CUDA_VISIBLE_DEVICES": found_gpus[number % len(found_gpus)]}
        for number, name in enumerate((handoffs.P, handoffs.D))
    }
    with tempfile.TemporaryDirectory() as folder:
        args = f"{ENGINE_ARGS} {engine_args}"
        common = {
            "served_model_name": "baton-tiny",
            "model": str(make_model(Path(folder))),
            "max_model_len": "16384",
            "kv_cache_bytes": str(KV_BYTES),
            "engine_args": args,
        }
        plainly = {"engine_args": f"{args} {plain_reads.ENGINE_ARGS}"}
        ours = {handoffs.P: {**common, "role": "prefill"}, handoffs.D: {**common, "role": "decode", **plainly}}
        theirs = {name: {**common, "role": ours[name]["role"], "connector": "upstream"} for name in ours}
        environ = {plain_reads.SOCKET: f"{folder}/plain-reads"}
        async with (
            bench_fleet(ours, environ=environ, devices=devices) as fleet,
            bench_fleet(theirs, devices=devices) as upstream,
        ):
            fleets = {STREAMED: fleet, OFFERED: fleet, UPSTREAM: upstream}
            with closing(PlainReader(environ[plain_reads.SOCKET])) as plain:
                beside = await handoffs.measure(fleets, times, plain)
                alone = await handoffs.measure_alone(fleet, times, plain)
            firsts = await handoffs.measure_first_steps(upstream, times)
    return [*handoff_lines(beside, WORK), *physics_lines(alone, firsts, WORK)]


def head(engine_args: str) -> list[str]:
    more = f", and `{engine_args}`" if engine_args else ""
    cards = sorted(
        {line.strip() for line in nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()}
    )
    return [
        "# Handoffs between GPUs",
        "",
        f"`make bench-kv GPU=1`, commit {commit()}. {len(gpus())} GPU(s), {'; '.join(cards)}: the prefill engines on the first, the decode",
        f"engines on the last. vLLM's defaults besides `{ENGINE_ARGS}`{more}. A Llama of three billion parameters in bfloat16, random weights.",
        "Upstream's engines have Baton's UCX settings.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="three handoffs of each kind; their figures are not precise"
    )
    parser.add_argument("--engine-args", default="", help="more arguments of `vllm serve`, for all engines")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/kv-gpu.md"))
    arguments = parser.parse_args()
    with measuring() as measured:
        measured.lines = asyncio.run(measure(QUICK if arguments.quick else TIMES, arguments.engine_args))
    parts: dict[str, Measured] = {"handoff": measured}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(page(head(arguments.engine_args), parts, list(parts), ""))
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
