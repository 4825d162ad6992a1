"""What a router can be told, from ROUTER_* variables."""

from __future__ import annotations

import tomllib
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

import msgspec

from services.router.admission.policy import AdmissionPolicy
from services.router.auth.api_keys import SALT_CHARS_MIN, Keyring, read_keys
from services.router.auth.tenant_salt import salt_key
from services.router.placement.policy import Forcing, RequestPolicy, read_policy_fields, read_weights
from services.router.placement.revisions import read_shares
from services.router.relay.failure_policy import FailurePolicy, read_policy
from services.router.relay.migration import RESUMES_MAX_MAX
from shared.runtime.settings import SettingsError

FILE_BYTES_MAX = 32 * 1024 * 1024
"""A larger file is nothing that an operator wrote."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router, from ROUTER_* variables. Every ``_s`` is seconds, every ``_bytes_max`` a bound in bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    shared_port: int = 0
    """A port that routers of one system share, beside their own: the kernel spreads connections over them. 0: none."""
    instance: str = ""
    """A name unique among routers, one subject token; made up when empty."""

    keys_file: str = ""
    """A TOML file with the API keys that are let in (``baton keys new`` makes it); read again when it changes. Empty,
    and no ``keys``: none is asked for, which is allowed only where no other machine can ask.
    """
    keys: str = ""
    """The same, as text."""
    salt_file: str = ""
    """A file with a secret of which the tenants' cache salts are made: the same for all routers, or they find nothing
    that others have had cached. Empty: ``salt`` in the keys' TOML.
    """
    insecure: bool = False
    """Serve other machines, although no key is asked for: whoever reaches this port may use and read everything."""
    published_host: str = ""
    """The address at which others reach this port, where it is not ``host``, as with a container's published port."""
    metrics: Literal["auto", "open", "admin"] = "auto"
    """Who may read ``/metrics`` where keys are asked for: whoever asks, or keys with the permission admin; ``auto``:
    whoever asks while only this machine can, or else admin.
    """

    body_bytes_max: int = 32 * 1024 * 1024
    """A larger request body is refused with 413."""
    bodies_bytes_max: int = 512 * 1024 * 1024
    """Bodies of all requests that are on their way in or being served; more are refused with 503."""
    head_s_max: float = 20.0
    """A client that takes longer to ask, from the opening of its connection or from a request's first byte to the end
    of its head, is disconnected.
    """
    body_s_max: float = 60.0
    """A client that takes longer to send its body is refused."""
    read_s_max: float = 60.0
    """A client that takes longer to read what was written to it, while more waits or when its answer is complete, is
    disconnected; its legs are cancelled.
    """
    answer_bytes_max: int = 256 * 1024 * 1024
    """A buffered answer that grows larger fails its request."""
    leg_buffer_bytes_max: int = 8 * 1024 * 1024
    """Frames that wait for a slow client; more abort the request."""
    requests_at_once_max: int = 8192
    """Requests served at a time; more are refused with 503."""
    connections_max: int = 16384
    """Client connections that are open at a time; more are answered 503 and closed. 0: as many as come."""
    connections_per_address_max: int = 8192
    """Of these, how many may come from one address (of IPv6: one /64 network). 0: as many as come, for a load balancer
    stands before this router.
    """

    request_s_max: float = 600.0
    """The whole request, its queueing and all attempts included."""
    prefill_s_max: float = 120.0
    """One prefill leg, from its start to its report."""
    first_frame_s_max: float = 120.0
    """From the start of the answering leg to its first frame, and from its head to its first data."""
    frame_gap_s_max: float = 60.0
    """Between two frames of a stream that has begun."""
    attempts_max: int = 3
    """Placements of one request, the first included, before its failure is told to the client."""
    resumes_max: int = 3
    """How often a stream that broke off may go on elsewhere; a body's ``baton.resumes_max`` may ask for less."""
    failure_policy: str = ""
    """A TOML file that says what is done about each kind of failure; empty: the defaults."""
    bus_wait_s_max: float = 5.0
    """New requests wait so long for NATS to come back, and for the workers behind it; then 503."""
    drain_s_max: float = 30.0
    """After SIGTERM: time for running requests to end."""
    silent_s_max: float = 3.0
    """A worker that was not heard for so long gets nothing new."""

    stream_tokens_min: int = 1024
    """Prompt tokens to compute from which on both legs are dispatched together, and decode reads the KV as prefill
    computes it; 0: always, negative: never, decode then comes when prefill has ended.
    """
    fetch_tokens_min: int = 256
    """Fewer prompt tokens are computed, although another worker holds their KV; a body's ``kv_fetch_min_tokens`` says
    otherwise for its request.
    """

    queue_max: int = 1024
    """Requests that wait for their turn, in all; of those that come then, some are refused."""
    tenant_queue_max: int = 1024
    """Requests of one tenant that wait, for each model and priority; more are refused with 429."""
    queue_s_max: float = 60.0
    """Nobody waits longer for a turn; who is predicted to is refused at once, with 503."""
    engine_queue_s_max: float = 0.25
    """A request goes to an engine that is predicted to begin it within so long, or within about what usual requests
    take; until then it waits in the router, where it can still go anywhere.
    """
    late_ratio: float = 1.0
    """A request whose first token would come later than so many times its target is refused with 503."""
    serve_late: bool = True
    """Whether a request whose target even an idle worker would miss is served in calm times, or always refused."""
    slos: str = ""
    """Targets in seconds and priorities, as JSON: ``{"default": {"ttft_s": 2, "itl_s": 0.1}, "models": {"m": {...}},
    "classes": {"batch": {"ttft_s": null, "priority": 10}}}``. A class says more than a model, and that more than the
    default; lower priorities are more urgent; null: no target.
    """
    priority_min: int = 0
    """The most urgent that a body may ask for by itself; classes may be more urgent."""
    tenant_weights: str = ""
    """JSON: ``{"paying": 4}``. A tenant of weight 4 may have four times as much as others, who have 1."""
    revision_shares: str = ""
    """JSON: ``{"my-model": {"v1": 90, "v2": 10}}``. Of a model's conversations, how many each revision serves, while
    all have workers; all turns of one stay together. Commits and digests may be cut to their first 7 digits or more. A
    revision with a share of 0, or none, serves only while no worker of the others is ready.
    """
    force_placement: Forcing = "auto"
    """Who may choose workers and sources in a body; ``auto``: anyone, while only this machine can be a client."""

    tokenize: Literal["auto", "always", "never"] = "auto"
    """Whether prompts are tokenized for exact prefix match; ``auto``: if more than one worker could compute them."""
    tokenize_loop_chars_max: int = 4096
    """Characters of a prompt that are tokenized at once; the rest, in a thread, so that the event loop goes on."""
    tokenize_cache_bytes_max: int = 64 * 1024 * 1024
    """Pieces of prompts whose tokens and block hashes are remembered."""

    decisions_max: int = 10_000
    """Placements that are remembered, to be explained; the oldest are forgotten beyond that."""
    decisions_bytes_max: int = 64 * 1024 * 1024
    """Memory for them, about."""
    trace_slow_s: float = 2.0
    """A request whose first token takes longer is traced, whatever the share of those that are; one with a target of
    its own, when it misses that.
    """
    log_requests: bool = True
    """One line for each finished request."""
    keep_alive_s: float = 75.0
    """How long an idle client connection stays open."""


def check(settings: Settings) -> None:
    """Raises SettingsError for what can be read and makes no sense."""
    check_entrance(settings)
    request_policy(settings)
    admission_policy(settings)
    failure_policy(settings)
    if not 0 <= settings.resumes_max <= RESUMES_MAX_MAX:
        raise SettingsError(f"ROUTER_RESUMES_MAX is {settings.resumes_max}; it must be 0 to {RESUMES_MAX_MAX}")


def check_entrance(settings: Settings) -> None:
    """Strangers need keys. Raises SettingsError."""
    keyring = keyring_of(settings)
    if keyring is not None:
        salt_secret_of(settings, keyring)
    elif not is_local(settings) and not settings.insecure:
        raise SettingsError(
            f"anybody could ask for anything at {settings.published_host or settings.host}, for there are no API keys; "
            "make one with `baton keys new --tenant NAME --file keys.toml` and set ROUTER_KEYS_FILE=keys.toml, "
            "or set ROUTER_INSECURE=true (`baton up --insecure`) if only friends can reach it"
        )


def keyring_of(settings: Settings) -> Keyring | None:
    """The API keys that are let in; None where no key is asked for. Raises SettingsError."""
    if settings.keys_file and settings.keys:
        raise SettingsError("ROUTER_KEYS_FILE and ROUTER_KEYS are both set; unset one")
    if not settings.keys_file and not settings.keys:
        return None
    where = f"ROUTER_KEYS_FILE ({settings.keys_file})" if settings.keys_file else "ROUTER_KEYS"
    try:
        text = read_text(settings.keys_file) if settings.keys_file else settings.keys
        return read_keys(tomllib.loads(text))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{where}: {error}; correct it or unset it") from error


def salt_secret_of(settings: Settings, keyring: Keyring) -> bytes:
    """Of which each tenant's salt is made. Raises SettingsError."""
    try:
        text = read_text(settings.salt_file).strip() if settings.salt_file else keyring.salt
    except (OSError, ValueError) as error:
        raise SettingsError(f"ROUTER_SALT_FILE ({settings.salt_file}): {error}; correct it or unset it") from error
    if len(text) < SALT_CHARS_MIN:
        raise SettingsError(
            f"tenants cannot be kept apart: the secret for their salts has {len(text)} characters and must have "
            f'{SALT_CHARS_MIN} random ones or more; put `salt = "..."` on top of the API keys '
            "(`baton keys new --file` does), or set ROUTER_SALT_FILE, the same for all routers"
        )
    return salt_key(text)


def read_text(path: str) -> str:
    """A small file of the operator's. Raises OSError, ValueError."""
    with Path(path).open("rb") as file:
        said = file.read(FILE_BYTES_MAX + 1)
    if len(said) > FILE_BYTES_MAX:
        raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
    return said.decode()


def is_local(settings: Settings) -> bool:
    """Whether only this machine can be a client."""
    return _is_this_machine(settings.published_host or settings.host)


def failure_policy(settings: Settings) -> FailurePolicy:
    """What is done about failures. Raises SettingsError."""
    path = settings.failure_policy
    if not path:
        return FailurePolicy()
    try:
        return read_policy(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise SettingsError(f"ROUTER_FAILURE_POLICY ({path}): {error}; correct it or unset it") from error


def request_policy(settings: Settings) -> RequestPolicy:
    """On what terms requests are served. Raises SettingsError."""
    try:
        terms = read_policy_fields(
            settings.slos, settings.force_placement, settings.priority_min, local=_is_this_machine(settings.host)
        )
    except ValueError as error:
        raise SettingsError(f"ROUTER_SLOS: {error}; correct it or unset it") from error
    try:
        return msgspec.structs.replace(terms, shares=read_shares(settings.revision_shares))
    except ValueError as error:
        raise SettingsError(f"ROUTER_REVISION_SHARES: {error}; correct it or unset it") from error


def admission_policy(settings: Settings) -> AdmissionPolicy:
    """How long requests wait, and how many. Raises SettingsError."""
    try:
        weights = read_weights(settings.tenant_weights)
    except ValueError as error:
        raise SettingsError(f"ROUTER_TENANT_WEIGHTS: {error}; correct it or unset it") from error
    for name, least in (("queue_max", 0), ("tenant_queue_max", 0), ("queue_s_max", 0.0), ("late_ratio", 1.0)):
        if not getattr(settings, name) >= least:
            raise SettingsError(f"ROUTER_{name.upper()} is {getattr(settings, name)}; it must be {least} or more")
    return AdmissionPolicy(
        queue_max=settings.queue_max,
        tenant_queue_max=settings.tenant_queue_max,
        queue_s_max=settings.queue_s_max,
        engine_queue_s_max=settings.engine_queue_s_max,
        late_ratio=settings.late_ratio,
        serve_late=settings.serve_late,
        tenant_weights=weights,
    )


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
