"""Orders that an operator gives at the console: the permission to give them, and their parser."""

from __future__ import annotations

import msgspec

from shared.contracts.adapters import AdapterAction, OrderAdapter
from shared.contracts.control import DEFAULT_MODES, DefaultMode
from shared.contracts.fleet_orders import ChangeRole, DrainWorker
from shared.contracts.ids import WorkerId, is_subject_token
from shared.contracts.workers import Role

ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)
"""Roles that a worker with an engine can take."""
DRAIN_S_MAX = 86400.0
LOOPBACK_ONLY = (
    "This console accepts no orders: it does not listen on loopback and has no admin key. Set COLLECTOR_ADMIN_KEY_FILE "
    "for the collector (compose: KEYS_FILE), or use the `baton` command."
)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP error for the client."""

    status: int
    message: str


class DrainRequest(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="action", tag="drain", forbid_unknown_fields=True
):
    """Drain a worker."""

    worker_id: str
    deadline_s: float | None = None


class RoleRequest(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="action", tag="role", forbid_unknown_fields=True
):
    """Change a worker's role."""

    worker_id: str
    role: Role


class ModeRequest(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="action", tag="mode", forbid_unknown_fields=True
):
    """Set the default mode: that of requests that do not ask for one."""

    mode: str


class AdapterRequest(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="action", tag="adapter", forbid_unknown_fields=True
):
    """Load or unload a LoRA adapter."""

    change: AdapterAction
    name: str
    path: str = ""
    model: str = ""
    workers: list[str] = msgspec.field(default_factory=list)


Order = DrainWorker | ChangeRole | DefaultMode | OrderAdapter
REQUEST = msgspec.json.Decoder(DrainRequest | RoleRequest | ModeRequest | AdapterRequest)
CONSOLE = "console"
"""Who gives the orders of this page, for the orchestrator's log."""


class OrderClient(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the client that gives an order."""

    on_loopback: bool
    """Only this machine can reach the console."""
    names_loopback: bool
    """The browser was given a loopback address. A page of another site whose host name resolves to this machine (DNS
    rebinding) sends its own name instead.
    """
    key_exists: bool
    """An admin key is configured."""
    key_given: bool
    key_matches: bool


def refusal_of(client: OrderClient) -> Refusal | None:
    """Why this client may give no orders; None when it may."""
    if client.key_exists:
        if client.key_matches:
            return None
        wrong = "That is not the admin key." if client.key_given else "This needs the admin key."
        return Refusal(status=401, message=wrong)
    if not client.on_loopback:
        return Refusal(status=403, message=LOOPBACK_ONLY)
    if not client.names_loopback:
        return Refusal(status=403, message="Without an admin key, open the console as 127.0.0.1 or localhost to act.")
    return None


def parse_order(body: bytes) -> Order | Refusal:
    try:
        request = REQUEST.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Refusal(status=400, message=f"That is not an order: {error}.")
    if isinstance(request, ModeRequest):
        wrong = Refusal(status=400, message=f"`mode` must be one of {', '.join(DEFAULT_MODES)}.")
        return DefaultMode(mode=request.mode) if request.mode in DEFAULT_MODES else wrong
    if isinstance(request, AdapterRequest):
        return adapter_order(request)
    if not is_subject_token(request.worker_id):
        return Refusal(status=400, message="`worker_id` is not a worker id: see the list of workers.")
    worker_id = WorkerId(request.worker_id)
    if isinstance(request, DrainRequest):
        if request.deadline_s is not None and not 0 <= request.deadline_s <= DRAIN_S_MAX:
            return Refusal(status=400, message=f"`deadline_s` must be 0 to {DRAIN_S_MAX:g} seconds.")
        return DrainWorker(worker_id=worker_id, deadline_s=request.deadline_s)
    if request.role not in ROLES:
        return Refusal(status=400, message="`role` must be prefill, decode or both.")
    return ChangeRole(worker_id=worker_id, role=request.role)


def adapter_order(request: AdapterRequest) -> OrderAdapter:
    """The orchestrator, which carries it out, checks its contents."""
    return OrderAdapter(
        action=request.change,
        name=request.name,
        path=request.path,
        model=request.model,
        workers=[WorkerId(one) for one in request.workers],
        by=CONSOLE,
    )
