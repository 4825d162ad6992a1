"""The router's settings, from ROUTER_* variables."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shared.loopback import is_loopback

Forcing = Literal["auto", "anyone", "nobody"]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
LEAVE_S = 3.0
"""Load balancers ask for readiness every second or two."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every ``_s`` is in seconds, every ``_bytes_max`` in bytes."""

    # Addresses
    host: str = "127.0.0.1"
    """Address of the API. Change it when other machines are to reach it; then API keys are needed, or ``insecure``."""
    port: int = 8000
    """Port of the API. Change it when another process has it."""
    shared_port: int = 0
    """A port that all routers of a machine share, besides their own: the kernel spreads connections over them. 0: none.
    Change it when several routers run on one machine without a load balancer; ``baton up --routers`` sets it.
    """
    published_host: str = ""
    """The address at which clients reach this port, where it is not ``host``. Change it when a container's port is
    published: it decides whether keys are needed.
    """
    instance: str = ""
    """A unique name among routers, one NATS subject token; generated when empty. Change it when metrics and the console
    are to know a router by the same name after a restart.
    """

    # Access
    keys_file: str = ""
    """A TOML file with API keys (``baton keys new`` makes it); read again when it changes. Empty, and no ``keys``: no
    key is needed, which is allowed only where no other machine can connect. Change it when clients of other machines,
    or several tenants, use the router.
    """
    keys: str = ""
    """The content of a file of API keys. Change it when the platform hands secrets to processes as variables, not
    files.
    """
    salt_file: str = ""
    """A file with the secret of the tenants' cache salts. It must be the same for all routers, or their requests share
    no cached prefixes. Empty: ``salt`` in the keys' TOML. Change it when the file of the keys, which holds only
    digests, is kept where secrets may not be.
    """
    insecure: bool = False
    """Serve other machines without API keys: every client that reaches this port may use and read everything. Change it
    when the network itself lets only trusted clients in.
    """
    allowed_hosts: str = ""
    """Names of a proxy in front of the router, and hosts of sites whose pages may use it, with commas:
    ``ai.example,app.example:3000``. Without API keys, pages of other sites may not use the router, and on loopback it
    answers only to addresses, ``localhost`` and names that no other party can register. Change it when a proxy or a web
    page gets 403 for its host or origin.
    """
    metrics: Literal["auto", "open", "admin"] = "auto"
    """Which clients may read ``/metrics`` where keys are needed: all (open), or those whose key has the permission view
    or admin (admin). auto: all if only this machine can connect, otherwise admin. Change it when Prometheus cannot send
    a key.
    """
    force_placement: Forcing = "auto"
    """Which clients may choose workers and sources in a body: anyone (with keys, those whose key permits it), nobody,
    or auto: all if only this machine can connect, and keys that permit it. Change it when a benchmark or a debugging
    client on another machine has to choose.
    """

    # Limits of clients
    body_bytes_max: int = 32 * 1024 * 1024
    """A larger request body is refused with 413. Change it when clients send larger images, audio or conversations."""
    bodies_bytes_max: int = 512 * 1024 * 1024
    """Memory of all requests' bodies, arriving or being served, and of the prompts made of them; requests beyond that
    are refused with 503. Change it when the machine's memory is smaller than that, or large enough for more and clients
    get 503 ``overloaded``.
    """
    head_s_max: float = 20.0
    """Time from the opening of a connection, or from a request's first byte, to the end of the request's head; a slower
    client is disconnected. Change it when clients have very slow networks.
    """
    body_s_max: float = 60.0
    """Time for a client to send its body; a slower one is refused with 408. Change it when clients upload large bodies
    over slow networks.
    """
    read_s_max: float = 60.0
    """Time for a client to read what was written, while more waits or when its response is complete; a slower one is
    disconnected and its legs are cancelled. Change it when clients pause while they read.
    """
    leg_buffer_bytes_max: int = 8 * 1024 * 1024
    """Frames of one leg that wait for a slow client; the leg fails beyond that. Change it when clients pause long
    within large responses, or too many slow ones fill the router's memory.
    """
    keep_alive_s: float = 75.0
    """How long an idle client connection stays open. Change it when a load balancer keeps idle connections longer: it
    then gets resets.
    """
    connections_max: int = 16384
    """Open client connections; 0: no limit. When all are taken, one that waits for its client makes room for a new one
    whose address has no more; if there is none, the new one is refused with 503. Change it when more clients keep a
    connection open, and the limit of open files allows it.
    """
    connections_per_address_max: int = 8192
    """Connections from one address (for IPv6: one /64 network); its oldest idle one makes room for one more. 0: no
    limit. Change it when a load balancer or NAT stands before the router: all clients have its address.
    """
    requests_at_once_max: int = 8192
    """Requests served at a time; more are refused with 503. Change it when the fleet serves more at a time, and the
    router has the memory.
    """
    sequences_max: Annotated[int, msgspec.Meta(ge=1)] = 2048
    """Sequences of one request (completions of its prompts, or inputs of a batch); more are refused with 400. An
    engine's worker counts each as a leg. Change it when clients embed larger batches of inputs, or one request may take
    too much of a worker.
    """

    # Deadlines and failures
    request_s_max: float = 600.0
    """Longest time of a request until the first token of its stream, with its queueing and all attempts; a resumed
    stream has that time again. Once tokens come, only ``ROUTER_FRAME_GAP_S_MAX`` ends a stream. An answer that is no
    stream must be complete within this time. Change it when such answers take longer than ten minutes.
    """
    first_frame_s_max: float = 120.0
    """Longest time from the start of a leg to its first frame, and from its head to its first data. A prefill leg has
    that time until its report. Change it when engines need longer for the longest prompts, or a silent engine is to be
    given up sooner.
    """
    frame_gap_s_max: float = 60.0
    """Longest time without a token of a stream that has begun; tokens that the client does not see count, such as
    hidden reasoning. An attached server is not asked for those: its events count. Workers tell of unseen tokens once a
    second: less than 3 s ends healthy streams. Change it when engines stall longer, or a stalled stream is to continue
    elsewhere sooner.
    """
    stream_ping_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Time without an event until the client of a stream gets a comment (``: waiting``; of messages a ``ping``). Before
    the first event the head precedes it, with status 200: a failure after that is an event, also one that would have
    been 429 or 503. 0: never. Change it when a load balancer ends connections that are idle while long prompts are
    computed: to less than its limit.
    """
    write_wait_s_max: Annotated[float, msgspec.Meta(ge=0.0)] = 0.1
    """How long an event may wait to be written together with the next ones of its stream, while more than 10,000 events
    a second come: n streams wait n / 5,000 s, but not longer than this. Fewer writes cost the router less. 0: no event
    waits. Change it when many streams per router need steadier tokens (less), or less CPU (more).
    """
    failure_policy: str = ""
    """A TOML file with the recovery actions for each kind of failure, and the bounds of attempts and waits; empty: the
    defaults of ``docs/failure-policy.toml``. Change it when failed requests are to be tried more or less often, in
    another order, or not at all.
    """
    quarantine_s: Annotated[float, msgspec.Meta(ge=0.0)] = 60.0
    """How long a request is refused with 422 after an engine died while it computed it; four times as long after each
    further death, an hour at most. 0: it may be sent again at once. Change it when engines die of other causes than
    requests.
    """
    wake_s_max: Annotated[float, msgspec.Meta(ge=0.0)] = 60.0
    """How long a request waits for its model to wake, if the model sleeps; then, or if that is expected to take longer,
    503 with Retry-After. 0: no request waits. Change it when the engines of sleeping models start slower, or clients
    rather try again.
    """
    drain_s_max: float = 30.0
    """Time from SIGTERM until the router ends, for running requests to end by themselves; 2 s before it is over, those
    that have not are ended with an error. Change it when answers take longer, and the supervisor waits for them before
    it kills.
    """
    leave_s: Annotated[float, msgspec.Meta(ge=0.0)] | None = None
    """The first seconds of ``drain_s_max``. The router still takes requests then, while ``/ready`` answers 503 and each
    response closes its connection, so that load balancers go elsewhere first. Empty: 3 s if other machines can
    connect, otherwise 0. Change it when a load balancer asks less often.
    """

    # Targets and queues
    slos: str = ""
    """Targets in seconds and priorities, as JSON: ``{"default": {"ttft_s": 2, "itl_s": 0.1}, "models": {"m": {...}},
    "classes": {"batch": {"ttft_s": null, "priority": 10}}}``. A class overrides a model, a model the default; lower
    priorities are more urgent; null: no target. ``"priority_min": -5`` is the most urgent priority that a body may ask
    for (0). ``"serve_late": false`` always refuses a request whose target even an idle worker would miss, instead of
    serving it under low load. Change it when you have promised latencies, or some requests may wait for others.
    """
    queue_max: Annotated[int, msgspec.Meta(ge=0)] = 1024
    """Requests in the admission queue; when it is full, some are refused. Change it when more clients wait patiently,
    or they rather get 503 at once.
    """
    tenant_queue_max: Annotated[int, msgspec.Meta(ge=0)] = 1024
    """Queued requests of one tenant, for each model and priority; more are refused with 429. Change it when one tenant
    fills the queue.
    """
    queue_s_max: Annotated[float, msgspec.Meta(ge=0.0)] = 60.0
    """The longest wait in the queue. A request that is predicted to wait longer is refused at once with 503. Change it
    when clients wait longer, or give up sooner.
    """
    tenant_weights: str = ""
    """JSON: ``{"paying": 4}``. A tenant of weight 4 gets four times the share of the others, which have 1. Change it
    when tenants are not to get equal shares of a full fleet.
    """

    # Placement
    revision_shares: str = ""
    """JSON: ``{"my-model": {"v1": 90, "v2": 10}}``. Each revision's share of its model's conversations, while all have
    workers; all requests of a conversation use one revision. Commits and digests may be cut to 7 digits or more. A
    revision with a share of 0, or none, serves only while no worker of the others is ready. Change it when a new
    revision of a model is rolled out.
    """
    tokenize: Literal["auto", "always", "never"] = "auto"
    """Whether prompts are tokenized for exact prefix matches: always, never, or auto: if more than one worker could
    compute them. Change it when routers have no CPU to spare for it (never), or a single worker's cache hits are to be
    predicted (always).
    """
    stream_tokens_min: int = 0
    """Prompt tokens to compute from which on both legs start together and decode reads the KV as prefill
    computes it. 0: always; negative: never, the decode leg starts when the prefill leg has ended. Change it when decode
    workers run out of KV memory while prompts are computed.
    """
    fetch_tokens_min: int = 256
    """Fewer prompt tokens are computed rather than fetched from another worker. A body's ``kv_fetch_min_tokens``
    overrides it. Change it when the network between workers is much faster or slower than usual: `make bench-kv`
    measures it.
    """
    decode_first_share_min: Share = 0.5
    """A decode worker may be asked to serve a request alone (decode first) if it is expected to have, or to fetch, this
    share of the prompt. Change it when prompts computed on decode workers delay their streams (higher), or prefill
    workers are full while decode workers have time (lower).
    """
    decode_first_found_min: Share = 0.8
    """A decode worker that is asked to serve a request alone refuses if it finds less than this fraction of the
    expected share, because blocks were evicted meanwhile; then a prefill worker computes the prompt. A body's
    ``cache_hit_threshold`` overrides it. Change it when too many such requests are refused (lower; 0: none is), or
    compute too much on decode workers (higher).
    """

    # Responses, files and batches
    response_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Largest response of ``/v1/responses`` that is kept for its client, with its whole history, as JSON: for
    ``previous_response_id``, ``GET`` and ``background``. 0: none are kept. Change it when clients use these.
    """
    responses_tenant_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 64 * 1024 * 1024
    """Responses that this router keeps for a tenant together, compressed; beyond, the tenant's oldest go. 0, or where
    no keys are needed: as much as there is room (``ORCHESTRATOR_RESPONSES_BYTES_MAX``). Change it when one tenant
    displaces the responses of others.
    """
    files_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Files of one tenant together (``/v1/files``), its batches' results included; ``/v1/batches`` needs them. 0: there
    are neither. Change it when clients use batches.
    """
    batch_lines_at_once: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 32
    """Lines of batches that this router serves at a time, while nothing waits; a quarter of them beside other requests.
    Half as many again are for tenants that have fewer than those. No more are computed again when the router dies.
    Change it when batches leave engines idle.
    """

    # Observability
    decisions_bytes_max: int = 64 * 1024 * 1024
    """Approximate memory for placement decisions, the newest, at ``/baton/decisions``. Change it when decisions are
    gone before you look at them.
    """
    log_requests: bool = True
    """Whether each finished request gets a log line. Change it when the lines are too many, or another system has them.
    """

    @property
    def leaves_s(self) -> float:
        """``leave_s``, or its default; never more than half of the time to end."""
        chosen = self.leave_s if self.leave_s is not None else 0.0 if self.is_local else LEAVE_S
        return min(chosen, self.drain_s_max / 2)

    @property
    def is_local(self) -> bool:
        """Whether only clients on this machine can connect."""
        return is_loopback(self.published_host or self.host)

    @property
    def listens_locally(self) -> bool:
        """Whether the address is one that other machines and containers cannot reach, published or not."""
        return is_loopback(self.host)
