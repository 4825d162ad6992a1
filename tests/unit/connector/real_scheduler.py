"""vLLM's scheduler over a simulated KV memory, without an engine or weights.

A computed step writes into each token's slot a hash of the prefix that ends there, so a block holds the right KV exactly
if its slots hold the prefix hashes of one prompt. Several steps may be in flight.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest

from connector.holder.boundaries import one_group
from connector.holder.holder import Holder, HolderSettings
from shared.contracts.ids import Epoch, WorkerId

BLOCK_TOKENS = 16
BLOCKS = 40
TOKENS_A_STEP = 64
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


FINGERPRINT = {
    "model": "m",
    "revision": "r",
    "dtype": "float32",
    "block_size": BLOCK_TOKENS,
    "kv_layout": "l",
    "connector": "c",
    "engine_version": "v",
}
CONNECTOR = {
    "kv_connector": "BatonConnector",
    "kv_connector_module_path": "connector.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"worker_id": "d", "epoch": 1, "fingerprint": FINGERPRINT},
}


def make_scheduler(
    folder: Path, *, asynchronous: bool, with_connector: bool = False, tokens_a_step: int = TOKENS_A_STEP
):
    """A scheduler as EngineCore builds it, for a model that has a configuration and no weights.

    ``with_connector``: Baton's, with Baton's connector, instead of vLLM's own.
    """
    config = pytest.importorskip("vllm.config")
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    (folder / "config.json").write_text(json.dumps(MODEL))
    model = config.ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=2048)
    limits = config.SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=tokens_a_step,
        max_model_len=2048,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache = config.CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    transfer = config.KVTransferConfig(**CONNECTOR) if with_connector else None
    whole = config.VllmConfig(
        model_config=model, cache_config=cache, scheduler_config=limits, kv_transfer_config=transfer
    )
    whole.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=1, dtype=torch.float32)
    if with_connector:
        from connector.scheduler.engine_scheduler import BatonAsyncScheduler, BatonScheduler

        kinds = BatonAsyncScheduler, BatonScheduler
    else:
        kinds = AsyncScheduler, Scheduler
    return (kinds[0] if asynchronous else kinds[1])(
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
        log_stats=False,
    )


def next_token(tokens: list[int]) -> int:
    """The simulated model's next token."""
    return (sum(tokens) * 31 + len(tokens)) % 97


def prefixes(tokens: list[int]) -> list[int]:
    """A hash of each prefix."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]


@dataclass
class Running:
    """The model runner's state of a request."""

    tokens: list[int]
    prefixes: list[int]
    blocks: list[int]


class Engine:
    """Schedules up to ``depth`` steps ahead, computes them in order, and reports both to the holder."""

    def __init__(self, folder: Path, *, depth: int) -> None:
        self.scheduler = make_scheduler(folder, asynchronous=depth > 1)
        self.depth = depth
        self.now = 0.0
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_first = self.pool.get_num_free_blocks()
        self.holder = Holder(HolderSettings(WorkerId("p"), Epoch(1), lease_share_max=0.3), lambda: self.now)
        self.holder.bind(self.pool, one_group(BLOCK_TOKENS))
        self.holder.watch(self.pool)
        self.memory = [[0] * BLOCK_TOKENS for _ in range(BLOCKS)]
        self.running: dict[str, Running] = {}
        self.requests: dict = {}
        self.queue: deque = deque()
        self.preemptions = 0

    def add(self, request_id: str, prompt: list[int], answer_tokens: int) -> list[bytes]:
        """Add a request; returns the full hashes of its prompt."""
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256_cbor)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=answer_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256_cbor),
        )
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return [bytes(block_hash) for block_hash in request.block_hashes]

    def history(self, request_id: str) -> tuple[list[int], list[bytes]]:
        """Prefix hashes and full block hashes of a request's prompt and output so far."""
        request, running = self.requests[request_id], self.running.get(request_id)
        names = running.prefixes if running else prefixes(request.prompt_token_ids)
        return names, [bytes(block_hash) for block_hash in request.block_hashes]

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    @property
    def busy(self) -> bool:
        return bool(self.queue) or self.scheduler.has_requests()

    def schedule(self) -> None:
        self.holder.begin_step()
        step = self.scheduler.schedule()
        self.holder.scheduled(step)
        self.queue.append((step, self._take_tables(step)))

    def compute(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        step, work = self.queue.popleft()
        sampled = [self._write(*one) for one in work]
        ids = [one[0] for one in work]
        self.holder.computed(step)
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={one: at for at, one in enumerate(ids)}, sampled_token_ids=sampled
        )
        self.scheduler.update_from_output(step, output)

    def holds(self, block_id: int, names: list[int], index: int) -> bool:
        """Whether the block holds the KV of block ``index`` of a prompt with these prefix hashes."""
        return self.memory[block_id] == names[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]

    def _take_tables(self, step) -> list[tuple]:
        """(request id, state, current blocks, computed tokens, scheduled tokens) of each request in the step."""
        known = step.scheduled_cached_reqs
        for new in step.scheduled_new_reqs:
            self.running[new.req_id] = Running(
                list(new.prompt_token_ids), prefixes(new.prompt_token_ids), list(new.block_ids[0])
            )
        for request_id, blocks in zip(known.req_ids, known.new_block_ids, strict=True):
            state = self.running[request_id]
            if request_id in known.resumed_req_ids:
                self.preemptions += 1
                state.blocks = []
            state.blocks = state.blocks + list(blocks[0] if blocks else [])
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        computed |= dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
        return [
            (request_id, self.running[request_id], self.running[request_id].blocks, computed[request_id], count)
            for request_id, count in step.num_scheduled_tokens.items()
        ]

    def _write(self, request_id: str, state: Running, blocks: list[int], computed: int, count: int) -> list[int]:
        for at in range(computed, computed + count):
            self.memory[blocks[at // BLOCK_TOKENS]][at % BLOCK_TOKENS] = state.prefixes[at]
        if computed + count < len(state.tokens):
            return []
        state.tokens.append(next_token(state.tokens))
        state.prefixes.append(hash((state.prefixes[-1], state.tokens[-1])))
        return state.tokens[-1:]
