"""The options of `baton up`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from shared.contracts.workers import Role

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes of ``512M``, ``2GiB`` or ``1073741824``, in powers of 1024. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not found:
        raise ValueError(f"{text!r} is not a size; write it like 512M or 2G")
    return int(float(found[1]) * UNITS[found[2]])


class Span(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of one host in engines, or data parallel groups, that are on several."""

    nodes: int
    """Hosts of each engine or group."""
    node: int
    """This one's number; of an engine, 0 has the worker."""
    address: str
    """Address of node 0."""
    port: int
    """The hosts of the first engine or group meet here; those of the next one meet at the next port."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one model."""

    model: str = ""
    """Name or folder of the model; empty: the worker's default."""
    aliases: tuple[str, ...] = ()
    """Names in requests besides the model."""
    prefill: int = 0
    decode: int = 0
    both: int = 0
    store: int = 0
    """Workers that store KV blocks and compute nothing."""
    host_memory_bytes: int = 0
    """Memory of all stores together; 0: the worker's default for each."""
    object_store: str = ""
    """Bucket of all stores, each with a folder of its own in it; empty: none."""
    attach: tuple[str, ...] = ()
    """Servers outside of Baton, each with a worker of its own: ``URL`` or ``URL=MODEL``, the model's name there."""
    attach_key_file: str = ""
    """File with the API key for these servers."""
    connector: Literal["baton", "upstream", ""] = ""
    """KV connector of vLLM engines; empty: the worker's default."""
    kv_backend: str = ""
    """NIXL's plug-in that moves KV between workers; empty: the worker's default."""
    kv_cache_bytes: int = 0
    engine_args: str = ""
    gpus_per_worker: int = 1
    """Ranks of each engine: GPUs, or on a CPU groups of cores. At least one for each pipeline stage."""
    gpus_per_prefill: int = 0
    """GPUs of each prefill worker; 0: ``gpus_per_worker``."""
    gpus_per_decode: int = 0
    """GPUs of each decode worker; 0: ``gpus_per_worker``."""
    pipeline: int = 1
    """Pipeline stages of each engine, over which its ranks are shared out equally."""
    pipeline_prefill: int = 0
    """Stages of each prefill worker; 0: ``pipeline``."""
    pipeline_decode: int = 0
    """Stages of each decode worker; 0: ``pipeline``."""
    data_parallel: int = 1
    """Workers of each data parallel group. The numbers of workers are of groups then."""
    data_parallel_prefill: int = 0
    """Prefill workers of each group; 0: ``data_parallel``."""
    data_parallel_decode: int = 0
    """Decode workers of each group; 0: ``data_parallel``."""
    spans: Mapping[Role, Span] = msgspec.field(default_factory=dict)
    """Roles whose engines have ranks on several hosts, of which ``gpus_per_worker`` counts those of one host, and roles
    whose data parallel groups have workers on several.
    """
    sleep_after_s: float = 0.0
    """The model goes to sleep if it has no request for this long; 0: never by itself."""
    workers_min: int = 1
    workers_max: int = 0
    """Most workers, up to which the planner may start and drain; 0: no scaling."""

    @property
    def roles(self) -> list[Role]:
        """Roles of the workers with engines, in start order."""
        groups = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.both}
        return [role for role, count in groups.items() for _ in range(count * self.group_here(role))]

    @property
    def store_settings(self) -> dict[str, str]:
        """The variables of each store."""
        settings = {}
        if self.host_memory_bytes:
            settings["WORKER_STORE_MEMORY_BYTES"] = str(self.host_memory_bytes // self.store)
        if self.object_store:
            settings["WORKER_STORE_OBJECTS_URL"] = self.object_store
        return settings

    def gpus_of(self, role: Role) -> int:
        own = {Role.PREFILL: self.gpus_per_prefill, Role.DECODE: self.gpus_per_decode}
        return max(own.get(role, 0) or self.gpus_per_worker, -(-self.stages_of(role) // self.hosts_of(role)))

    def hosts_of(self, role: Role) -> int:
        """Hosts of each engine."""
        return self.spans[role].nodes if role in self.spans and self.group_of(role) == 1 else 1

    def stages_of(self, role: Role) -> int:
        own = {Role.PREFILL: self.pipeline_prefill, Role.DECODE: self.pipeline_decode}
        return own.get(role, 0) or self.pipeline

    def group_of(self, role: Role) -> int:
        """Workers of each data parallel group; 1: there are none."""
        own = {Role.PREFILL: self.data_parallel_prefill, Role.DECODE: self.data_parallel_decode}
        return own.get(role, 0) or self.data_parallel

    def group_here(self, role: Role) -> int:
        """Those of them on this host."""
        return self.group_of(role) // (self.spans[role].nodes if self.group_of(role) > 1 and role in self.spans else 1)

    @property
    def gpu_counts(self) -> list[int]:
        """GPUs of each worker that may ever run; those at the start come first."""
        counts = [self.gpus_of(role) for role in self.roles]
        return counts + [self.gpus_of(Role.BOTH)] * (self.workers_most - len(counts))

    @property
    def workers_most(self) -> int:
        """Workers with engines that may ever run at a time."""
        return max(len(self.roles), self.workers_max)


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    models: tuple[ModelOptions, ...] = (ModelOptions(),)
    engine: Literal["vllm", "simulated"] = "vllm"
    host: str = "127.0.0.1"
    port: int = 8000
    routers: int = 1
    """Several routers share ``port``."""
    router_ports: tuple[int, ...] = ()
    """Each router's own port, if there are several."""
    collector_host: str = "127.0.0.1"
    collector_port: int = 8001
    nats_port: int = 4222
    nats_host: str = "127.0.0.1"
    """Address on which the NATS that is started listens."""
    nats_url: str = ""
    """A running NATS; empty: start one."""
    keys_dir: str = ""
    """A folder of `baton init`: NATS requires keys and TLS. Empty: neither (`baton up --open`, or another NATS)."""
    state_dir: str
    insecure: bool = False
    """Serve every client that reaches ``host``, without API keys."""
    access_configured: bool = False
    """The environment configures client access to the routers."""
    join: bool = False
    keep_trying: bool = False
    """A worker that cannot be started does not end the others; unless its configuration is wrong, it is tried again."""
    host_name: str = ""
    """Name of this host in a fleet; empty: no fleet. Ids of workers begin with it, and workers that are missing here
    may be on other hosts.
    """
    own_keys: bool = False
    """``keys_dir`` has a key for each single worker, and no other."""
    cores: tuple[int, ...] = ()
    """Logical CPUs for workers; empty: all."""
    gpus: tuple[str, ...] = ()
    """GPU indexes for workers; empty: all."""
    awake_max: int = 0
    """Models that may be awake at a time; 0: all. The others start asleep."""

    @property
    def scales(self) -> bool:
        """Whether the planner may start and drain workers of some model."""
        return any(each.workers_max for each in self.models)
