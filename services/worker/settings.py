"""A worker's settings, from WORKER_* variables."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from services.worker.engines.simulated.core.settings import SimulatedTiming
from shared.contracts.workers import Role

TINY_MODEL = "baton-tiny"
"""The model that the project makes itself (see ``services.worker.tiny_model.tiny_model``)."""


Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Settings(SimulatedTiming, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Worker, from WORKER_* variables."""

    worker_id: str = ""
    """One subject token, kept across restarts of the process; empty: made of the role and the process id."""
    role: Role = Role.BOTH
    engine: Literal["vllm", "simulated"] = "vllm"
    model: str = TINY_MODEL
    """``baton-tiny``, a local path, or a Hugging Face id."""
    revision: str = ""
    """Hugging Face branch, tag or commit; empty: the newest that is cached or the hub's main."""
    served_model_name: str = ""
    """The name that requests ask for; empty: the model's own."""
    cpu_cores: str = ""
    """Cores that the engine computes on, such as ``0`` or ``0,1``; empty: all that the process may use."""
    kv_cache_bytes: int = 0
    """Memory for KV blocks; 0: 256 MiB on CPU, vLLM's own choice on a GPU."""
    max_model_len: int = 0
    """Longest prompt and completion in tokens; 0: the model's own, or less if the KV memory holds less."""
    block_size: int = 32
    """Tokens in a KV block; equal on all workers of a model."""
    legs_max: int = 256
    """Legs taken at a time; one more is refused with WORKER_BUSY."""
    drain_s_max: float = 30.0
    """Seconds that running legs get to finish after SIGTERM."""
    evacuate_s_max: Annotated[float, msgspec.Meta(ge=0.0)] = 10.0
    """Seconds that a worker that leaves spends on having its hot prefixes fetched by those that stay; 0: none."""
    connector: Literal["baton", "upstream"] = "baton"
    """What moves KV between vLLM engines: the exchange, or vLLM's own NixlConnector, to compare with."""
    cache_hit_threshold: Share = 0.0
    """Requests are refused of which less than this share of the prompt is cached or can be fetched, unless they say
    otherwise; 0: none."""
    kv_fetch_min_tokens: int = 64
    """Fetching fewer tokens than this from another worker is not worth it, unless a request says otherwise."""
    kv_lease_s: Annotated[float, msgspec.Meta(gt=0.0, le=60.0)] = 30.0
    """Seconds that a prompt's blocks are kept for a decode worker that does not come."""
    kv_lease_share_max: Share = 0.5
    """Of the KV blocks, how many leases may pin, 0.0 to 1.0; more are refused."""
    kv_copy_uses_min: Annotated[int, msgspec.Meta(ge=0)] = 2
    """Prefixes that so many requests have used are copied to a store, if there is one; 0: none."""
    store_memory_bytes: Annotated[int, msgspec.Meta(gt=0)] = 1 << 30
    """With ``role`` store: memory for copies of KV blocks."""
    store_files_bytes: Annotated[int, msgspec.Meta(ge=0)] = 4 << 30
    """With ``role`` store: the most that its files may take, so that copies survive a restart; 0: no files."""
    store_dir: str = ""
    """With ``role`` store: where each store has a folder by its worker id; empty: ``kv-store`` in BATON_STATE_DIR."""
    store_io: Literal["auto", "nixl", "plain"] = "auto"
    """With ``role`` store: NIXL's POSIX plugin, plain file calls, or the latter where the former cannot run."""
    kv_host: str = "127.0.0.1"
    """With ``connector`` upstream: address at which other workers reach this one's KV side channel."""
    engine_args: str = ""
    """Further vLLM arguments, as one would type them: ``--max-num-seqs 64 --enable-lora``."""
