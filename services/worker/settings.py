"""A worker's settings."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from services.worker.engines.plugged import plugged_engines
from services.worker.engines.simulated.core.settings import SimulatedProfile, read_profile
from shared.contracts.ids import ALIAS_RULE, is_model_alias
from shared.contracts.workers import USUAL_BACKEND, Role

TINY_MODEL = "baton-tiny"
"""A random model that the worker makes itself (see ``services.worker.tiny_model``)."""

BLOCK_TOKENS = 32
"""vLLM's CPU engines prefer multiples of 32; their own default of 128 finds short shared prefixes in no cache."""

OWN_ENGINES = ("vllm", "simulated", "attached")

NAMES_MAX = 64

RANKS_MAX = 256
"""Workers of a data parallel group."""

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From WORKER_* variables."""

    # Identity
    worker_id: str = ""
    """One subject token; keep it across restarts of the process. Empty: made of the role and the process id. Change it
    when a supervisor starts workers: give each a lasting name.
    """
    role: Role = Role.BOTH
    """prefill, decode, both, or store: memory for copies of KV blocks, without an engine. Change it when the fleet is
    split into prefill and decode workers, or has a store.
    """

    # Model
    model: str = TINY_MODEL
    """``baton-tiny``, a local path, or a Hugging Face id. Change it when you serve a model of your own choice."""
    revision: str = ""
    """Hugging Face branch, tag or commit; empty: the newest that is cached or the hub's main. Change it when all
    workers have to serve the same revision, or a new one is rolled out.
    """
    served_model_name: str = ""
    """The model name in requests; empty: ``model``. Change it when clients know the model by another name."""
    aliases: str = ""
    """Further names of the model in requests, separated by commas; equal on all workers of a model. Change it when
    clients use several names.
    """
    max_model_len: int = 0
    """Longest prompt plus completion in tokens; 0: the model's own, or less if the KV memory holds less. Change it when
    long requests are to be refused, or the model's own length does not fit.
    """
    lora_dir: str = ""
    """Folder with LoRA adapters; the operator may load those in it at run time. Empty: none. Change it when adapters
    are loaded without a restart.
    """
    lora_adapters: str = ""
    """LoRA adapters to load at start, such as ``sql=sql-v2 mail=/adapters/mail``: paths, relative to ``lora_dir``.
    Change it when the model is served with adapters.
    """

    weights_dir: str = ""
    """Folder with checkpoints of the model; the operator may load those in it in place. Empty: none. Change it when
    weights change without a restart, as in RL.
    """

    # Engine
    engine: str = "vllm"
    """vllm, simulated, or attached: no engine of its own, requests are passed on to the server of ``attach_url``. Or
    the name of an entry point of the group ``baton.engines``: an engine, or with the role store a store, of your own.
    Change it when there is no vLLM here (simulated), another server has the model (attached), or you have such a
    package.
    """
    engine_args: str = ""
    """Further arguments for vLLM, such as ``--max-num-seqs 64``. Change it when vLLM needs an option that no other
    setting has.
    """
    cpu_cores: str = ""
    """CPU cores of the engine, such as ``0`` or ``0,2-3``, or a part of those that the process may use: ``1/2`` and
    ``2/2`` are their halves. Empty: all of them. Change it when several CPU engines share a machine: engines that share
    a core are many times slower.
    """
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Ranks of each pipeline stage of a vLLM engine: GPUs, or on a CPU equal parts of ``cpu_cores``, with a core each
    at least. Change it when the model does not fit on one GPU.
    """
    pipeline_parallel_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Pipeline stages of a vLLM engine, each with ``tensor_parallel_size`` ranks and a part of the layers. Change it
    when the model does not fit on GPUs that are connected well enough for tensor parallelism.
    """
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)] = 1
    """Workers of a data parallel group, which share out the experts' work of a model with experts; 1: no group. Change
    it when the experts do not fit on the GPUs of one worker. All are on one host, unless ``head_address`` is set.
    """
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    """This worker's place in its group, from 0. Change it when ``data_parallel_size`` is set."""
    data_parallel_group: str = ""
    """Name of the group, of which no other on the host has the same. Change it when ``data_parallel_size`` is set."""
    data_parallel_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    """TCP port of rank 0 at which the engines of the group find each other; 0: it chooses a free one. Change it when a
    port must be known beforehand.
    """
    nodes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Hosts that share the ranks of a vLLM engine equally. Change it when one host has too few GPUs for the model."""
    node: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Which of the engine's ``nodes`` this process is for: 0, the worker itself, or a further one, whose process has an
    id of its own, runs its host's ranks and follows the worker. Change it when a host is a further one.
    """
    head_address: str = ""
    """Where the hosts of an engine, or of a data parallel group, meet: address and port of node 0 or rank 0, such as
    ``10.0.0.1:9700``. Change it when ``nodes`` is more than 1, or a group has workers on several hosts.
    """
    kv_cache_bytes: int = 0
    """Memory for KV blocks; 0: 256 MiB on CPU, vLLM's own choice on a GPU. Change it when a CPU engine serves long
    prompts or many requests.
    """
    block_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens in a KV block, equal on all workers of a model; 0: vLLM's choice for the model on a GPU, 32 elsewhere.
    Change it when workers of a model must agree and choose differently.
    """
    legs_max: int = 256
    """Legs served at a time; further ones are refused with WORKER_BUSY. Change it when the engine or the attached
    server takes more, or fewer, requests at a time.
    """
    asleep: bool = False
    """Whether the worker starts without an engine, and starts that when a request for the model comes. Change it when
    the model is rarely used.
    """
    simulated: str = ""
    """Speeds of a simulated engine: a profile (default, instant, 8b, 70b, 80b-a3b), and values that differ from it,
    such as ``8b,speed=0.5,transfer=nixl``; a wrong one is answered with all names. Change it when clients, dashboards
    or placement are tried out without engines, at the speed of real ones.
    """

    # Attached server
    attach_url: str = ""
    """URL of the OpenAI-compatible server of an attached worker, such as ``http://gpu-1:30000`` or ``https://host/v1``.
    Change it when ``engine`` is attached.
    """
    attach_model: str = ""
    """The model's name at that server; empty: the name in requests, or the only model that the server lists. Change it
    when the server lists several models, or none.
    """
    attach_key_file: str = ""
    """File with the API key for that server; read again when it changes. Empty: none. Change it when the server asks
    for a key.
    """
    attach_silent_s_max: Annotated[float, msgspec.Meta(gt=0.0, le=86_400.0)] = 300.0
    """Longest pause of that server within an answer, or before it. Change it when the server takes longer for the
    longest prompts.
    """

    # KV exchange
    connector: Literal["baton", "upstream"] = "baton"
    """What moves KV between vLLM engines: baton, Baton's KV exchange, or upstream, vLLM's NixlConnector. Change it when
    you compare the two.
    """
    kv_backend: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_]{1,32}$")] = USUAL_BACKEND
    """NIXL's plug-in that moves KV between workers, equal on all workers of a model: UCX (shared memory, TCP, RDMA,
    NVLink), LIBFABRIC (EFA), or another one that NIXL has here. Change it when the network needs another one.
    """
    kv_host: str = ""
    """Address at which other workers reach this one. Empty: the address from which it reaches NATS. On loopback the
    exchange of KV over TCP is confined to this host. Change it when other hosts reach this one at another address.
    """
    cache_hit_threshold: Share = 0.0
    """Default for requests that this worker serves alone: refuse one if less than this share of its prompt is cached or
    can be fetched; 0: never. The router then places the request again, on another worker if one can serve it. Change it
    when a worker is to serve what it has cached, and others are there for the rest.
    """
    kv_fetch_min_tokens: int = 64
    """Default for requests: compute fewer tokens than this instead of fetching their KV. Change it when the network
    between workers is much faster or slower than usual.
    """
    kv_lease_s: Annotated[float, msgspec.Meta(gt=0.0, le=60.0)] = 30.0
    """Time that a prompt's blocks stay pinned for a decode worker that does not read them. Change it when lost decode
    workers take too much of the KV memory, or slow ones come too late.
    """
    kv_copy_uses_min: Annotated[int, msgspec.Meta(ge=0)] = 2
    """Copy a prefix to a store once this many requests have used it, or when the engine is about to evict it; 0: never
    copy any. Change it when a store is to hold prefixes earlier, so that other workers find them.
    """
    store_memory_bytes: Annotated[int, msgspec.Meta(gt=0)] = 1 << 30
    """Memory of a store for copies of KV blocks. Change it when the machine has more."""
    store_files_bytes: Annotated[int, msgspec.Meta(ge=0)] = 4 << 30
    """Maximum size of a store's files, in which copies survive a restart; 0: no files. Change it when the disk has
    more, or there is none.
    """

    store_objects_url: str = ""
    """Bucket of an object store that speaks S3, as http(s)://host/bucket, or a folder in it, for copies below a store's
    files; empty: none. Credentials are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the machine's role. Change it
    when histories are larger than the disk.
    """
    store_objects_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 << 30
    """Maximum size of a store's objects. Change it when the bucket may have more, or less."""

    # Shutdown
    drain_s_max: float = 30.0
    """Time that running legs get to finish after SIGTERM. Change it when answers take longer, and the supervisor waits
    for them before it kills.
    """
    stay_drained: bool = False
    """Whether the process waits for SIGTERM after an ordered drain instead of ending. Change it when a container's
    restart policy starts whatever ends.
    """

    def __post_init__(self) -> None:
        if self.engine not in OWN_ENGINES and self.engine not in plugged_engines():
            raise ValueError(
                f"WORKER_ENGINE: {self.engine!r} is no engine here; known: "
                f"{', '.join([*OWN_ENGINES, *sorted(plugged_engines())])}. Others come with packages that have entry "
                "points of the group baton.engines"
            )
        if self.asleep and self.role is Role.STORE:
            raise ValueError("WORKER_ASLEEP: a store has no engine to start later; unset it")
        if self.engine == "attached" and self.role is not Role.BOTH:
            raise ValueError("WORKER_ROLE: a worker with WORKER_ENGINE=attached serves whole requests; set it to both")
        lacks_exchange = self.engine == "attached" or (self.engine == "vllm" and self.connector != "baton")
        if self.cache_hit_threshold and lacks_exchange:
            raise ValueError(
                "WORKER_CACHE_HIT_THRESHOLD: a worker with WORKER_ENGINE=attached or WORKER_CONNECTOR=upstream cannot "
                "refuse requests by what is cached; unset it"
            )
        self._check_group()
        try:
            self.profile  # noqa: B018  # It is read here, so that a mistake stops the process at once.
        except ValueError as error:
            raise ValueError(f"WORKER_SIMULATED: {error}") from None
        if self.attach_url:
            try:
                root_of(self.attach_url)
            except ValueError as error:
                raise ValueError(f"WORKER_ATTACH_URL: {error}") from None
        if self.nodes > 1 or self.node:
            self._check_nodes()
        names = self.model_names
        if len(names) > NAMES_MAX:
            raise ValueError(f"WORKER_ALIASES: {len(names)} names are more than {NAMES_MAX}")
        for name in names[1:]:
            if not is_model_alias(name):
                raise ValueError(f"WORKER_ALIASES: {name!r} is no alias; write {ALIAS_RULE}")

    def _check_group(self) -> None:
        """Raises ValueError."""
        if self.data_parallel_size == 1:
            if self.data_parallel_rank or self.data_parallel_group or self.data_parallel_port:
                raise ValueError(
                    "WORKER_DATA_PARALLEL_SIZE: it is 1, but this worker has a rank, group or port; set it"
                )
            return
        if self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError(
                f"WORKER_DATA_PARALLEL_RANK: it is {self.data_parallel_rank}, but the group has "
                f"{self.data_parallel_size} ranks, of which the first is 0"
            )
        if not self.data_parallel_group:
            raise ValueError("WORKER_DATA_PARALLEL_GROUP: it is empty; give all workers of the group the same name")
        cannot = {
            "WORKER_ENGINE: only vLLM engines form data parallel groups": self.engine != "vllm",
            "WORKER_ROLE: a store has no engine, so it is in no data parallel group": self.role is Role.STORE,
            "WORKER_CONNECTOR: workers of a data parallel group need baton": self.connector != "baton",
            "WORKER_ASLEEP: a worker of a data parallel group does not sleep; unset it": self.asleep,
            "WORKER_WEIGHTS_DIR: weights of a data parallel group cannot be changed in place; unset it": bool(
                self.weights_dir
            ),
        }
        for why, is_so in cannot.items():
            if is_so:
                raise ValueError(why)
        if self.head_address:
            self._check_meeting()

    def _check_nodes(self) -> None:
        """Raises ValueError."""
        if self.engine != "vllm" or self.connector != "baton" or self.role is Role.STORE:
            raise ValueError(
                "WORKER_NODES: only a vLLM engine with Baton's KV exchange can have several hosts; set it to 1"
            )
        if self.data_parallel_size > 1:
            raise ValueError("WORKER_NODES: each worker of a data parallel group is on one host; set it to 1")
        if self.node >= self.nodes:
            raise ValueError(f"WORKER_NODE: the hosts of the engine are 0 to {self.nodes - 1}, by WORKER_NODES")
        if self.ranks % self.nodes:
            raise ValueError(
                f"WORKER_NODES: {self.ranks} ranks (WORKER_TENSOR_PARALLEL_SIZE times WORKER_PIPELINE_PARALLEL_SIZE) "
                f"cannot be shared out equally over {self.nodes} hosts"
            )
        self._check_meeting()

    def _check_meeting(self) -> None:
        """Raises ValueError."""
        try:
            self.meeting  # noqa: B018  # It is read here, so that a mistake stops the process at once.
        except ValueError:
            raise ValueError(
                f"WORKER_HEAD_ADDRESS: {self.head_address!r} is no address and port; write it as 10.0.0.1:9700, with "
                "an address of the first one's host that the others reach"
            ) from None

    @property
    def meeting(self) -> tuple[str, int]:
        """Address and port of ``head_address``. Raises ValueError."""
        parts = urlsplit(f"//{self.head_address}")
        address = ip_address(parts.hostname or "")
        if address.is_unspecified or not parts.port or parts.path or parts.username:
            raise ValueError(self.head_address)
        return str(address), parts.port

    @property
    def kv_address(self) -> str:
        """``kv_host``, or loopback where nothing has found one."""
        return self.kv_host or "127.0.0.1"

    @property
    def ranks(self) -> int:
        """Processes of the engine that compute, each with a GPU or CPU cores of its own."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_here(self) -> int:
        """Those of them on this host."""
        return self.ranks // self.nodes

    @property
    def model_names(self) -> list[str]:
        """Names of the model in requests, the primary one first. None for a worker that its server must tell."""
        aliases = [alias.strip() for alias in self.aliases.split(",")] if self.aliases else []
        return list(dict.fromkeys([name, *aliases])) if (name := self.named_model) else []

    @property
    def named_model(self) -> str:
        """The primary name in requests. An attached worker has no model by default: then its server's name counts."""
        if self.engine == "attached" and self.model == TINY_MODEL:
            return self.served_model_name or self.attach_model
        return self.served_model_name or self.model

    @property
    def profile(self) -> SimulatedProfile:
        """The speeds of a simulated engine."""
        return read_profile(self.simulated)

    @property
    def block_tokens(self) -> int:
        """Tokens in a KV block where vLLM does not choose."""
        return self.block_size or BLOCK_TOKENS


API = "/v1"
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


def root_of(url: str) -> str:
    """The URL without a path ``/v1`` at its end, to which an API's paths are added. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("write it as http://HOST:PORT or https://HOST/PATH")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("it must have no user, password, query or fragment: a key belongs in a file")
    if parts.port == 0:
        raise ValueError("0 is no port")
    path = parts.path.rstrip("/").removesuffix(API)
    return f"{parts.scheme}://{parts.netloc}{path}"


def sends_key_in_clear(root: str) -> bool:
    """Whether a key would leave this machine without encryption."""
    parts = urlsplit(root)
    return parts.scheme == "http" and parts.hostname not in LOCAL_HOSTS
