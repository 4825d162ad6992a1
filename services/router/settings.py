"""The router's settings, from ROUTER_* variables."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shared.loopback import is_loopback

Forcing = Literal["auto", "anyone", "nobody"]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every ``_s`` is in seconds, every ``_bytes_max`` in bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    shared_port: int = 0
    """A port that all routers of a system share, besides their own: the kernel spreads connections over them. 0: none.
    """
    instance: str = ""
    """A unique name among routers, one NATS subject token; generated when empty."""

    keys_file: str = ""
    """A TOML file with API keys (``baton keys new`` makes it); read again when it changes. Empty, and no ``keys``: no
    key is needed, which is allowed only where no other machine can connect.
    """
    keys: str = ""
    """The content of such a file."""
    salt_file: str = ""
    """A file with the secret of the tenants' cache salts. It must be the same for all routers, or their requests share
    no cached prefixes. Empty: ``salt`` in the keys' TOML.
    """
    insecure: bool = False
    """Serve other machines without API keys: every client that reaches this port may use and read everything."""
    published_host: str = ""
    """The address at which clients reach this port, where it is not ``host``: for a container's published port."""
    allowed_hosts: str = ""
    """Without API keys, pages of other sites may not use the router, and on loopback it answers only to addresses,
    ``localhost`` and names that no other party can register. Names of a proxy in front of it, and hosts of sites whose
    pages may use it, with commas: ``ai.example,app.example:3000``.
    """
    metrics: Literal["auto", "open", "admin"] = "auto"
    """Which clients may read ``/metrics`` where keys are needed: all, or (``admin``) those whose key has the permission
    view or admin. ``auto``: all if only this machine can connect, otherwise admin.
    """

    body_bytes_max: int = 32 * 1024 * 1024
    """A larger request body is refused with 413."""
    bodies_bytes_max: int = 512 * 1024 * 1024
    """Memory of all requests' bodies, arriving or being served, and of the prompts made of them; requests beyond that
    are refused with 503.
    """
    head_s_max: float = 20.0
    """From the opening of a connection, or from a request's first byte, to the end of the request's head; a slower
    client is disconnected.
    """
    body_s_max: float = 60.0
    """Time for a client to send its body; a slower one is refused with 408."""
    read_s_max: float = 60.0
    """For a client to read what was written, while more waits or when its response is complete; a slower one is
    disconnected and its legs are cancelled.
    """
    leg_buffer_bytes_max: int = 8 * 1024 * 1024
    """Frames that wait for a slow client; the leg fails beyond that."""
    quarantine_s: Annotated[float, msgspec.Meta(ge=0.0)] = 60.0
    """How long a request is refused with 422 after an engine died while it computed it; four times as long after each
    further death, an hour at most. 0: it may be sent again at once.
    """
    sequences_max: Annotated[int, msgspec.Meta(ge=1)] = 2048
    """Sequences of one request (completions of its prompts, or inputs of a batch); more are refused with 400. An
    engine's worker counts each as a leg.
    """
    requests_at_once_max: int = 8192
    """Requests served at a time; more are refused with 503."""
    connections_max: int = 16384
    """Open client connections. When all are taken, one that waits for its client makes room for a new one whose address
    has no more; if there is none, the new one is refused with 503. 0: no limit.
    """
    connections_per_address_max: int = 8192
    """Connections from one address (for IPv6: one /64 network); its oldest idle one makes room for one more. 0: no
    limit, for a router behind a load balancer.
    """

    request_s_max: float = 600.0
    """The whole request, with its queueing and all attempts."""
    first_frame_s_max: float = 120.0
    """From the start of a leg to its first frame, and from its head to its first data; also a whole prefill leg."""
    frame_gap_s_max: float = 60.0
    """Longest pause between two frames of a stream that has begun."""
    write_wait_s_max: Annotated[float, msgspec.Meta(ge=0.0)] = 0.1
    """How long an event may wait to be written together with the next ones of its stream, while more than 10,000 events
    a second come: n streams wait n / 5,000 s, but not longer than this. Fewer writes cost the router less. 0: no event
    waits.
    """
    failure_policy: str = ""
    """A TOML file with the recovery actions for each kind of failure; empty: the defaults."""
    wake_s_max: Annotated[float, msgspec.Meta(ge=0.0)] = 60.0
    """How long a request waits for its model to wake, if the model sleeps; then, or if that is expected to take longer,
    503 with Retry-After. 0: no request waits.
    """
    drain_s_max: float = 30.0
    """Time for running requests to end after SIGTERM."""

    stream_tokens_min: int = 0
    """With this many prompt tokens to compute or more, both legs start together and decode reads the KV as prefill
    computes it. 0: always; negative: never, the decode leg starts when the prefill leg has ended.
    """
    fetch_tokens_min: int = 256
    """Fewer prompt tokens are computed rather than fetched from another worker. A body's ``kv_fetch_min_tokens``
    overrides it.
    """

    queue_max: Annotated[int, msgspec.Meta(ge=0)] = 1024
    """Requests in the admission queue; when it is full, some are refused."""
    tenant_queue_max: Annotated[int, msgspec.Meta(ge=0)] = 1024
    """Queued requests of one tenant, for each model and priority; more are refused with 429."""
    queue_s_max: Annotated[float, msgspec.Meta(ge=0.0)] = 60.0
    """The longest wait in the queue. A request that is predicted to wait longer is refused at once with 503."""
    serve_late: bool = True
    """Whether a request whose target even an idle worker would miss is served under low load, or always refused."""
    slos: str = ""
    """Targets in seconds and priorities, as JSON: ``{"default": {"ttft_s": 2, "itl_s": 0.1}, "models": {"m": {...}},
    "classes": {"batch": {"ttft_s": null, "priority": 10}}}``. A class overrides a model, a model the default; lower
    priorities are more urgent; null: no target.
    """
    priority_min: int = 0
    """The most urgent priority that a body may ask for; classes may be more urgent."""
    tenant_weights: str = ""
    """JSON: ``{"paying": 4}``. A tenant of weight 4 gets four times the share of the others, which have 1."""
    revision_shares: str = ""
    """JSON: ``{"my-model": {"v1": 90, "v2": 10}}``. Each revision's share of its model's conversations, while all
    have workers; all requests of a conversation use one revision. Commits and digests may be cut to 7 digits or more. A
    revision with a share of 0, or none, serves only while no worker of the others is ready.
    """
    force_placement: Forcing = "auto"
    """Which clients may choose workers and sources in a body; ``auto``: all if only this machine can connect."""

    tokenize: Literal["auto", "always", "never"] = "auto"
    """Whether prompts are tokenized for exact prefix matches; ``auto``: if more than one worker could compute them."""

    response_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    """A response of ``/v1/responses`` that is kept for its client, with its whole history, as JSON: for
    ``previous_response_id``, ``GET`` and ``background``. Larger ones are not kept. 0: none are.
    """
    responses_tenant_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 64 * 1024 * 1024
    """Maximum bytes of all responses that this router keeps for a tenant, compressed; beyond, the tenant's oldest go.
    0, or where no keys are needed: as much as there is room (``ORCHESTRATOR_RESPONSES_BYTES_MAX``)."""

    files_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Files of one tenant together (``/v1/files``), its batches' results included; ``/v1/batches`` needs them. 0: there
    are neither.
    """
    batch_lines_at_once: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 32
    """Lines of batches that this router serves at a time, while nothing waits; a quarter of them beside other requests.
    At most so many are computed again when the router dies. 1 to 4096.
    """

    decisions_bytes_max: int = 64 * 1024 * 1024
    """Approximate memory for them."""
    log_requests: bool = True
    """Log a line for each finished request."""
    keep_alive_s: float = 75.0
    """How long an idle client connection stays open."""

    @property
    def is_local(self) -> bool:
        """Whether only clients on this machine can connect."""
        return is_loopback(self.published_host or self.host)

    @property
    def listens_locally(self) -> bool:
        """Whether the address is one that other machines and containers cannot reach, published or not."""
        return is_loopback(self.host)
