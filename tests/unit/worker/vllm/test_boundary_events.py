"""What a router makes of the KV events of vLLM's real managers is what vLLM itself finds cached, for each kind of model."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from connector.layout.engine_layout import beyond_boundaries, dropped_from_hits
from services.router.placement.kv_sources import boundaries_of
from services.router.state.prefix_index import PrefixIndex
from services.worker.engines.vllm.engine import hash_scheme
from services.worker.kv_events import HeldBlocks
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import KvEventBatch, KvSnapshot, block_hash64
from shared.contracts.workers import HashScheme
from tests.unit.connector.real_scheduler import DRAFTER

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

ME = WorkerId("w")
BLOCKS = 160
STEPS_MAX = 2000
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
WINDOWS = {"narrow": 17, "window": 40, "wide": 150}
Groups = tuple[tuple[str, int], ...]
LAYOUTS: dict[str, tuple[Groups, int, int | None]] = {
    "full": ((("full", 16),), 16, 0),
    "full and drafter": ((("full", 16),), 16, 0),
    "windows alone and drafter": ((("window", 16),), 16, None),
    "full and window": ((("window", 16), ("full", 16)), 16, None),
    "full and window, kept at prompts' ends": ((("window", 16), ("full", 16)), 16, 0),
    "window of other blocks": ((("window", 16), ("full", 32)), 16, None),
    "three states and full": ((("state", 32), ("state", 32), ("state", 32), ("full", 32)), 32, 64),
    "states within blocks": ((("state", 64), ("full", 64)), 16, 0),
    "windows alone": ((("window", 16),), 16, None),
    "windows of two widths": ((("narrow", 16), ("full", 16), ("window", 16)), 16, None),
    "windows of two widths, kept at prompts' ends": ((("window", 16), ("full", 16), ("narrow", 16)), 16, 0),
    "window and drafter": ((("window", 16), ("full", 16)), 16, None),
    "window and drafter, kept at prompts' ends": ((("window", 16), ("full", 16)), 16, 0),
    "window of longer blocks and drafter": ((("window", 32), ("full", 16)), 16, None),
    "window of shorter blocks and drafter": ((("window", 16), ("full", 32)), 16, None),
    "wide window of shorter blocks and drafter": ((("wide", 16), ("full", 32)), 16, None),
}
"""Kinds and block sizes of groups, the unit of hashes, and the retention interval."""


def spec_of(kind: str, block_size: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    heads: dict[str, Any] = {"num_kv_heads": 2, "head_size": 1, "dtype": torch.float32}
    match kind:
        case "full":
            return FullAttentionSpec(block_size=block_size, **heads)
        case "window" | "narrow" | "wide":
            return SlidingWindowSpec(block_size=block_size, sliding_window=WINDOWS[kind], **heads)
        case _:
            return MambaSpec(
                block_size=block_size, shapes=((block_size * 2, 2),), dtypes=(torch.float32,), mamba_cache_mode="align"
            )


class Engine:
    """vLLM's scheduler and managers; the model is made up."""

    def __init__(self, folder: Path, layout: str, blocks: int = BLOCKS) -> None:
        from vllm import config
        from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens, resolve_kv_cache_block_sizes
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import (
            KVCacheConfig,
            KVCacheGroupSpec,
            get_kv_cache_spec_sliding_window,
            is_full_attention_spec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        (folder / "config.json").write_text(json.dumps(MODEL))
        groups, unit, interval = LAYOUTS[layout]
        has_state = any(kind == "state" for kind, _size in groups)
        cache = config.CacheConfig(
            block_size=min(size for _kind, size in groups), enable_prefix_caching=True, prefix_match_unit=unit
        )
        if has_state:
            cache.mamba_cache_mode = "align"
        whole = config.VllmConfig(
            model_config=config.ModelConfig(
                model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=2048
            ),
            cache_config=cache,
            scheduler_config=config.SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=192,
                max_model_len=2048,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
                disable_hybrid_kv_cache_manager=False,
            ),
            kv_events_config=config.KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )
        whole.cache_config.num_gpu_blocks = blocks
        if has_state:
            whole.cache_config.mamba_cache_mode = "align"
        if "drafter" in layout:
            whole.speculative_config = DRAFTER
        placed = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{number}"], spec_of(*group)) for number, group in enumerate(groups)
            ],
            prefix_cache_retention_interval=interval if len(groups) > 1 or groups[0][0] == "window" else None,
        )
        block_size, unit = resolve_kv_cache_block_sizes(placed, whole)
        placed.hash_block_size = unit
        placed.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(placed, whole, block_size, unit)
        self.scheduler = Scheduler(
            vllm_config=whole,
            kv_cache_config=placed,
            structured_output_manager=StructuredOutputManager(whole),
            block_size=block_size,
            hash_block_size=unit,
            log_stats=False,
        )
        self.scheduler.kv_event_publisher = self
        self.events: list[Any] = []
        self.manager = self.scheduler.kv_cache_manager
        full = [
            (
                group.kv_cache_spec.block_size,
                is_full_attention_spec(group.kv_cache_spec),
                get_kv_cache_spec_sliding_window(group.kv_cache_spec) or 0,
            )
            for group in placed.kv_cache_groups
        ]
        self.groups = full
        beyond = beyond_boundaries(whole, placed)
        dropped = dropped_from_hits(whole, placed)
        self.scheme: HashScheme = hash_scheme(cache, unit, placed.cache_hit_alignment_tokens, full, beyond, dropped)
        self._numbers = iter(range(10_000))

    def publish(self, batch: Any) -> None:
        self.events += batch.events

    def shutdown(self) -> None: ...

    def request(self, prompt: list[int], answer_tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256_cbor)
        return Request(
            request_id=f"r{next(self._numbers)}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=answer_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.scheme.block_size, sha256_cbor),
        )

    def run(self, *requests: Any) -> None:
        """Serve them side by side."""
        from vllm.v1.outputs import ModelRunnerOutput

        for request in requests:
            self.scheduler.add_request(request)
        for _ in range(STEPS_MAX):
            if not self.scheduler.has_requests():
                break
            step = self.scheduler.schedule()
            ids = list(step.num_scheduled_tokens)
            sampled = [[self._next(self.scheduler.requests[one], step)] for one in ids]
            sampled = [token if token != [-1] else [] for token in sampled]
            self.scheduler.update_from_output(
                step,
                ModelRunnerOutput(
                    req_ids=ids, req_id_to_index={one: at for at, one in enumerate(ids)}, sampled_token_ids=sampled
                ),
            )
        assert not self.scheduler.has_requests(), "the scheduler makes no progress"
        self.events += self.manager.take_events()

    def _next(self, request: Any, _step: Any) -> int:
        if request.num_computed_tokens < request.num_tokens:
            return -1
        return (sum(request.all_token_ids[-50:]) * 31 + request.num_tokens) % 97

    def cached(self, prompt: list[int]) -> int:
        """What vLLM finds: a new request for it is not run."""
        _blocks, tokens, *_more = self.manager.get_computed_blocks(self.request(prompt, 1))
        return int(tokens)


class Told:
    """A worker's translation, and a router's index of it."""

    def __init__(self, engine: Engine, run_dir: Path) -> None:
        from services.worker.engines.vllm.kv_events import KvEventSource

        self.engine, self.held, self.index = engine, HeldBlocks(), PrefixIndex()
        self.source = KvEventSource(run_dir)
        self.source.attach(engine.groups)
        self.index.join(ME, Epoch(1))
        self.index.restore(KvSnapshot(worker_id=ME, epoch=Epoch(1), seq=0, hashes=b""))

    def listen(self) -> None:
        told = [one for event in self.engine.events for one in self.source.translate(event)]
        self.engine.events.clear()
        seq = self.held.apply(told)
        assert not self.index.apply(KvEventBatch(worker_id=ME, epoch=Epoch(1), seq=seq, events=told))
        assert not self.index.check(ME, Epoch(1), self.held.digest())

    def cached(self, prompt: list[int]) -> int:
        """What the router predicts."""
        scheme = self.engine.scheme
        hashes = [block_hash64(bytes(one)) for one in self.engine.request(prompt, 1).block_hashes]
        usable = hashes[: (scheme.usable(len(prompt)) + (scheme.beyond or scheme.dropped)) // scheme.block_size]
        slot = self.index.slot(ME)
        if not scheme.boundaries:
            return max(0, int(self.index.match_depths(usable)[slot]) * scheme.block_size - scheme.dropped)
        return int(self.index.match_boundaries(usable, boundaries_of(scheme))[slot]) * scheme.block_size


def prompts_of(chance: random.Random, answered: list[list[int]]) -> list[int]:
    """A new conversation, a part of one, or its next turn."""
    deed = chance.random()
    if not answered or deed < 0.3:
        return [chance.randrange(100) for _ in range(chance.randint(5, 400))]
    earlier = chance.choice(answered)
    if deed < 0.45:
        earlier = earlier[: chance.randint(1, len(earlier))]
    return earlier[:1500] + [chance.randrange(100) for _ in range(chance.randint(0, 60))]


def lived(told: Told, turns: int, seed: int) -> tuple[int, list[tuple[int, int]]]:
    """How many predictions above 0 were right in a life of chats, and those that were wrong, as predicted and found
    tokens.
    """
    chance, engine, answered = random.Random(seed), told.engine, list[list[int]]()
    right, wrong = 0, list[tuple[int, int]]()
    for _ in range(turns):
        requests = [
            engine.request(prompts_of(chance, answered), chance.randint(1, 90)) for _ in range(chance.randint(1, 3))
        ]
        engine.run(*requests)
        answered += [list(request.all_token_ids) for request in requests]
        told.listen()
        for _ in range(5):
            prompt = prompts_of(chance, answered)
            predicted, found = told.cached(prompt), engine.cached(prompt)
            right += predicted == found > 0
            if predicted != found:
                wrong.append((predicted, found))
    return right, wrong


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [4000, BLOCKS], ids=["all kept", "evicted"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_predictions_are_what_vllm_finds(tmp_path, monkeypatch, layout, blocks):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")  # As ``arguments.py`` sets it.
    told = Told(Engine(tmp_path, layout, blocks), tmp_path)

    right, wrong = lived(told, turns=40, seed=blocks)
    told.source.close()

    assert right >= 30
    assert not wrong
