"""What Baton's connector adds to a step of vLLM's scheduler: ``python -m bench.bench_connector_step [--rounds 15]``.

Schedulers as EngineCore builds them, over blocks without memory and a model that always samples the same token: vLLM's own, without KV
events, with them, and with vLLM's NixlConnector; and Baton's, also while leases are held for readers. Only ``schedule`` and
``update_from_output`` are timed, as CPU of their thread; the connector's part of the model runner is not in it. An engine computes between
steps, which leaves little of the scheduler in the core's caches, so 8 MiB are read before each timed part. Schedulers take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}

import msgspec
import numpy as np
import torch
from vllm import config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from bench.bench_peers import ratio, shown
from bench.kv_bench_page import commit, machine
from connector.scheduler.engine_scheduler import BatonScheduler
from services.worker.engines.vllm.arguments import OWN_EVENT_PUBLISHER
from shared.contracts.ids import LegId
from shared.contracts.kv_exchange import LegOrder
from tests.unit.connector.real_scheduler import BLOCK_TOKENS, CONNECTOR, MODEL

COMMAND = "make bench-worker"
OUT = Path("docs/benchmarks/connector-step.md")
BLOCKS = 4096
PROMPT_TOKENS = 64
CACHE_BYTES = 8 << 20
LEASES = 16
NIXL = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector": "NixlConnector"}
LONG = {"lease_s": 3600.0, "lease_s_max": 3600.0}
OWN: Any = CONNECTOR
BATON = {**OWN, "kv_connector_extra_config": {**OWN["kv_connector_extra_config"], **LONG}}
PLAIN = "vLLM"
KINDS: dict[str, tuple[bool, dict[str, Any] | None]] = {
    PLAIN: (False, None),
    "vLLM with KV events": (True, None),
    "vLLM with KV events and NixlConnector": (True, NIXL),
    "Baton": (True, BATON),
    f"Baton, {LEASES} leases held": (True, BATON),
}
"""Whether KV events are published, and the connector."""
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class Load:
    tokens: int
    at_once: int
    requests: int

    @property
    def label(self) -> str:
        return f"{'one token' if self.tokens == 1 else f'{self.tokens} tokens'}, {self.at_once} at once"


LOADS = (Load(1, 1, 200), Load(1, 16, 320), Load(128, 1, 3), Load(128, 16, 16), Load(128, 64, 64))


class Engine:
    """A scheduler, and a model that samples token 5."""

    def __init__(self, folder: Path, *, events: bool, transfer: dict[str, Any] | None) -> None:
        self._is_baton = transfer is BATON
        self._numbers = iter(range(sys.maxsize))
        self._draw = random.Random(1)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        self._cache = np.zeros(CACHE_BYTES // 8, dtype=np.int64)
        self.scheduler = make_scheduler(folder, events=events, transfer=transfer)

    def hold_leases(self) -> None:
        """Prefill legs end with offers that nobody takes."""
        orders = (LegOrder(leg_id=LegId(str(n)), offer=True, offer_id=f"offer {n}") for n in range(LEASES))
        for order in orders:
            self._run([self._request(1, order)], at_once=1)
        held = self.scheduler.connector.connector_scheduler.holder.counts.leases
        assert held == LEASES, f"{held} of {LEASES} leases are held"

    def run(self, load: Load) -> float:
        """CPU microseconds for each token."""
        requests = [self._request(load.tokens, LegOrder()) for _ in range(load.requests)]
        return self._run(requests, load.at_once) / (load.requests * load.tokens) * 1e6

    def _run(self, requests: Sequence[Request], at_once: int) -> float:
        coming, took_s = iter(requests), 0.0
        while True:
            took_s += self._timed(lambda: self._fill(coming, at_once))
            if not self.scheduler.has_requests():
                return took_s
            took_s += self._step()

    def _fill(self, coming: Iterator[Request], at_once: int) -> None:
        while len(self.scheduler.requests) < at_once and (request := next(coming, None)) is not None:
            self.scheduler.add_request(request)

    def _step(self) -> float:
        made: list[Any] = []
        took_s = self._timed(lambda: made.append(self.scheduler.schedule()))
        ids = list(made[0].num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: at for at, name in enumerate(ids)}, sampled_token_ids=[[5]] * len(ids)
        )
        return took_s + self._timed(lambda: self.scheduler.update_from_output(made[0], output))

    def _timed(self, part: Callable[[], object]) -> float:
        self._cache.sum()
        begun = time.thread_time()
        part()
        return time.thread_time() - begun

    def _request(self, tokens: int, order: LegOrder) -> Request:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        if self._is_baton:
            params.extra_args = {"kv_transfer_params": {"baton": _encode(order)}}
        return Request(
            request_id=f"request-{next(self._numbers)}",
            prompt_token_ids=self._draw.choices(range(1000), k=PROMPT_TOKENS),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )


def make_scheduler(folder: Path, *, events: bool, transfer: dict[str, Any] | None) -> Scheduler:
    """As a worker's EngineCore has it, without memory."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    ends = Path(tempfile.mkdtemp(dir=folder))
    published = {"publisher": "zmq", "endpoint": f"ipc://{ends}/kv", "replay_endpoint": f"ipc://{ends}/replay"}
    whole = config.VllmConfig(
        model_config=config.ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32"),
        cache_config=config.CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        scheduler_config=config.SchedulerConfig(
            max_num_seqs=128,
            max_num_batched_tokens=8192,
            max_model_len=4096,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_transfer_config=config.KVTransferConfig(**transfer) if transfer else None,
        kv_events_config=config.KVEventsConfig(enable_kv_cache_events=True, **published) if events else None,
        observability_config=config.ObservabilityConfig(enable_logging_iteration_details=transfer is BATON),
    )
    whole.cache_config.num_gpu_blocks = BLOCKS
    if transfer is BATON:
        whole.kv_events_config.publisher = OWN_EVENT_PUBLISHER
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=1, dtype=torch.float32)
    return (BatonScheduler if transfer is BATON else Scheduler)(
        vllm_config=whole,
        kv_cache_config=KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            hash_block_size=BLOCK_TOKENS,
            cache_hit_alignment_tokens=BLOCK_TOKENS,
        ),
        structured_output_manager=StructuredOutputManager(whole),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        log_stats=True,
    )


def page(measured: dict[str, dict[str, list[float]]], rounds: int) -> str:
    lines = [
        "# What the connector adds to a step of vLLM's scheduler",
        "",
        f"`{COMMAND}`, commit {commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, on {machine()}; load average {os.getloadavg()[1]:.1f}.",
        "",
        "CPU of the thread that schedules, for each token, in `schedule` and `update_from_output`, without a model; 8 MiB are read before each,",
        "so that little of the scheduler is in the core's caches, as after a model's step. The connector's part of the model runner is not in it.",
        f"Medians of {rounds} rounds in turns with the least and the greatest. Ratios to vLLM's scheduler without KV events are medians of the rounds'",
        "ratios, with the sign test's interval.",
        "",
        "| requests | scheduler | CPU, µs/token | ratio |",
        "|---|---|---|---|",
    ]
    for label, of in measured.items():
        for kind, values in of.items():
            lines.append(f"| {label} | {kind} | {shown(values)} | {ratio(values, of[PLAIN])} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    rounds = arguments.rounds
    init_none_hash(sha256_cbor)
    measured: dict[str, dict[str, list[float]]] = {load.label: {kind: [] for kind in KINDS} for load in LOADS}
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            kind: Engine(Path(folder), events=events, transfer=transfer) for kind, (events, transfer) in KINDS.items()
        }
        for kind, engine in engines.items():
            if "leases" in kind:
                engine.hold_leases()
            for load in LOADS:
                engine.run(load)
        gc.collect()
        gc.freeze()
        for number in range(rounds):
            for load in LOADS:
                for kind in sorted(KINDS, reverse=bool(number % 2)):
                    measured[load.label][kind].append(engines[kind].run(load))
        text = page(measured, rounds)
        arguments.out.write_text(text)
        print(text, flush=True)
    os._exit(0)  # vLLM's publishers and connectors would wait for their threads.


if __name__ == "__main__":
    main()
