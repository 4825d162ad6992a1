"""vLLM's scheduler over a simulated KV memory, without an engine or weights.

A computed step writes into each token's slot a hash of the prefix that ends there, so a block holds the right KV exactly
if its slots hold the prefix hashes of one prompt. Several steps may be in flight.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import lcm
from pathlib import Path
from types import SimpleNamespace

import pytest

from connector.groups import GroupPlan
from connector.holder.holder import Holder, HolderSettings
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvGroup, KvGroupKind

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


Settings = tuple[tuple[str, object], ...]
"""Names and values of ``kv_connector_extra_config``."""


@dataclass(frozen=True)
class Layout:
    """The KV cache groups of a model, and how vLLM caches them."""

    groups: tuple[KvGroup, ...]
    unit: int = BLOCK_TOKENS
    """``--prefix-match-unit``."""
    caches: bool = True
    """Whether prefix caching is on."""
    drafts: bool = False
    """Whether there is a drafter, of which vLLM drops the end of each prefix that it finds."""

    @property
    def block_size(self) -> int:
        """Tokens that every group has in whole blocks."""
        return lcm(*(group.block_size for group in self.groups))

    @property
    def has_states(self) -> bool:
        return any(group.kind is KvGroupKind.STATE for group in self.groups)


def full(block_size: int) -> KvGroup:
    return KvGroup(kind=KvGroupKind.FULL, block_size=block_size)


def window(block_size: int, tokens: int) -> KvGroup:
    return KvGroup(kind=KvGroupKind.WINDOW, block_size=block_size, window=tokens)


def state(block_size: int) -> KvGroup:
    return KvGroup(kind=KvGroupKind.STATE, block_size=block_size)


DRAFTER = SimpleNamespace(
    num_speculative_tokens=0,
    max_num_new_slots_for_drafting=0,
    num_speculative_tokens_per_batch_size=None,
    use_eagle=lambda: True,
    use_eagle_block_drop=lambda: True,
    use_dspark=lambda: False,
    use_dflash=lambda: False,
    uses_draft_model=lambda: False,
    use_multi_module_mtp=lambda: False,
)
"""Proposes nothing. vLLM's scheduler and managers treat its blocks as EAGLE's."""
PLAIN = Layout((full(BLOCK_TOKENS),))


@cache
def _config(folder: Path, layout: Layout, *, with_connector: bool, tokens_a_step: int, settings: Settings):
    config = pytest.importorskip("vllm.config")
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
    smallest = min(group.block_size for group in layout.groups)
    cached = config.CacheConfig(block_size=smallest, enable_prefix_caching=layout.caches, prefix_match_unit=layout.unit)
    extra = {**CONNECTOR["kv_connector_extra_config"], **dict(settings)}
    transfer = config.KVTransferConfig(**{**CONNECTOR, "kv_connector_extra_config": extra}) if with_connector else None
    whole = config.VllmConfig(
        model_config=model, cache_config=cached, scheduler_config=limits, kv_transfer_config=transfer
    )
    whole.cache_config.mamba_cache_mode = "align" if layout.caches else "none"
    if layout.drafts:
        whole.speculative_config = DRAFTER
    return whole


def spec_of(group: KvGroup, *, caches: bool):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    if group.kind is KvGroupKind.STATE:
        mode = "align" if caches else "none"
        return MambaSpec(block_size=group.block_size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode=mode)
    about = {"block_size": group.block_size, "num_kv_heads": 2, "head_size": 1, "dtype": torch.float32}
    if group.kind is KvGroupKind.WINDOW:
        return SlidingWindowSpec(**about, sliding_window=group.window)
    return FullAttentionSpec(**about)


def make_scheduler(
    folder: Path,
    *,
    asynchronous: bool,
    with_connector: bool = False,
    tokens_a_step: int = TOKENS_A_STEP,
    layout: Layout = PLAIN,
    blocks: int = BLOCKS,
    retention: int | None = 0,
    kind: type | None = None,
    settings: Settings = (),
):
    """A scheduler as EngineCore builds it, for a model that has a configuration and no weights.

    ``with_connector``: Baton's, with Baton's connector, instead of vLLM's own. ``retention``: vLLM's
    ``prefix_cache_retention_interval``. ``kind``: another class of scheduler. ``settings``: of the connector.
    """
    whole = _config(folder, layout, with_connector=with_connector, tokens_a_step=tokens_a_step, settings=settings)
    from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens, resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    whole.cache_config.num_gpu_blocks = blocks
    caches = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer {number}"], spec_of(group, caches=layout.caches))
            for number, group in enumerate(layout.groups)
        ],
        prefix_cache_retention_interval=retention,
    )
    block_size, unit = resolve_kv_cache_block_sizes(caches, whole)
    caches.hash_block_size = unit
    caches.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(caches, whole, block_size, unit)
    if with_connector:
        from connector.scheduler.engine_scheduler import BatonAsyncScheduler, BatonScheduler

        kinds = BatonAsyncScheduler, BatonScheduler
    else:
        kinds = AsyncScheduler, Scheduler
    return (kind or (kinds[0] if asynchronous else kinds[1]))(
        vllm_config=whole,
        kv_cache_config=caches,
        structured_output_manager=StructuredOutputManager(whole),
        block_size=block_size,
        hash_block_size=unit,
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
    blocks: list[list[int]]
    """Block tables by group."""


class Engine:
    """Schedules up to ``depth`` steps ahead, computes them in order, and reports both to the holder."""

    def __init__(
        self,
        folder: Path,
        *,
        depth: int,
        layout: Layout = PLAIN,
        blocks: int = BLOCKS,
        retention: int | None = 0,
        kind: type | None = None,
    ) -> None:
        self.scheduler = make_scheduler(
            folder, asynchronous=depth > 1, layout=layout, blocks=blocks, retention=retention, kind=kind
        )
        # As vLLM does for a connector that reads: a step in flight may still write into blocks of an ended request.
        self.scheduler.defer_block_free = depth > 1
        self.depth = depth
        self.layout = layout
        self.unit = self.scheduler.hash_block_size
        self.now = 0.0
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.free_at_first = self.pool.get_num_free_blocks()
        self.holder = Holder(HolderSettings(WorkerId("p"), Epoch(1), lease_share_max=0.3), lambda: self.now)
        aligned = self.scheduler.kv_cache_config.cache_hit_alignment_tokens
        beyond = max(group.block_size for group in layout.groups) if layout.drafts else 0
        groups = GroupPlan(list(layout.groups), self.unit, aligned, beyond=beyond)
        from connector.scheduler.connector_scheduler import boundary_finder  # imports vLLM

        self.holder.bind(self.pool, groups, boundary_finder(self.manager.coordinator, beyond))
        self.holder.watch(self.pool)
        self.alignment = aligned
        largest = max(group.block_size for group in layout.groups)
        self.memory: list[list[tuple[int, int]]] = [[(-1, 0)] * largest for _ in range(blocks)]
        """What each slot of a block holds: the group and the prefix. A state has the first slot only."""
        self.running: dict[str, Running] = {}
        self.requests: dict = {}
        self.queue: deque = deque()
        self.preemptions = 0
        self.copies = 0

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
            block_hasher=get_request_block_hasher(self.unit, sha256_cbor),
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
        for copy in step.kv_cache_block_copies or ():
            self.copies += 1
            self.memory[copy.dst_block_id] = list(self.memory[copy.src_block_id])
        sampled = [self._write(*one) for one in work]
        ids = [one[0] for one in work]
        self.holder.computed(step)
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={one: at for at, one in enumerate(ids)}, sampled_token_ids=sampled
        )
        self.scheduler.update_from_output(step, output)

    def holds(self, block_id: int, names: list[int], index: int, number: int = 0, end: int | None = None) -> bool:
        """Whether the block holds what block ``index`` of group ``number`` has of a prompt with these prefix hashes,
        up to its token ``end``.
        """
        group = self.layout.groups[number]
        begin, stop = index * group.block_size, (index + 1) * group.block_size
        end = stop if end is None else min(stop, end)
        wanted = names[end - 1 : end] if group.kind is KvGroupKind.STATE else names[begin:end]
        return self.memory[block_id][: len(wanted)] == [(number, name) for name in wanted]

    def _take_tables(self, step) -> list[tuple]:
        """(request id, state, current block tables, computed tokens, scheduled tokens) of each request in the step."""
        known = step.scheduled_cached_reqs
        for new in step.scheduled_new_reqs:
            self.running[new.req_id] = Running(
                list(new.prompt_token_ids), prefixes(new.prompt_token_ids), [list(ids) for ids in new.block_ids]
            )
        for request_id, blocks in zip(known.req_ids, known.new_block_ids, strict=True):
            running = self.running[request_id]
            if request_id in known.resumed_req_ids:
                self.preemptions += 1
                running.blocks = [[] for _ in self.layout.groups]
            if blocks:
                running.blocks = [before + list(more) for before, more in zip(running.blocks, blocks, strict=True)]
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        computed |= dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
        return [
            (request_id, self.running[request_id], self.running[request_id].blocks, computed[request_id], count)
            for request_id, count in step.num_scheduled_tokens.items()
        ]

    def _write(
        self, request_id: str, running: Running, blocks: list[list[int]], computed: int, count: int
    ) -> list[int]:
        end = computed + count
        for number, group in enumerate(self.layout.groups):
            table, size, memory = blocks[number], group.block_size, self.memory
            if group.kind is not KvGroupKind.STATE:
                for at in range(computed, end):
                    memory[table[at // size]][at % size] = number, running.prefixes[at]
                continue
            if computed:
                before, now = table[(computed - 1) // size], table[(end - 1) // size]
                assert memory[before][0] == (number, running.prefixes[computed - 1]), "the scheduler lost a state"
                memory[now][0] = memory[before][0]
            memory[table[(end - 1) // size]][0] = number, running.prefixes[end - 1]
        if end < len(running.tokens):
            return []
        running.tokens.append(next_token(running.tokens))
        running.prefixes.append(hash((running.prefixes[-1], running.tokens[-1])))
        return running.tokens[-1:]
