"""Orders that an operator gives at the console: the permission to give them, their parser, their execution."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shared.bus.port import AskRefused, AskTimedOut, Bus, BusError, NoResponders
from shared.contracts.channels import CHANGE_ROLE, DEFAULT_MODE, DRAIN, ORDER_ADAPTER
from shared.contracts.control import DEFAULT_MODES, DefaultMode
from shared.contracts.fleet_orders import AdapterAction, ChangeRole, DrainWorker, OrderAdapter
from shared.contracts.ids import WorkerId, is_subject_token
from shared.contracts.workers import Role
from shared.text import fleet_text

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


ACCEPT_S_MAX = 5.0
"""Time for a worker to accept an order."""
ROLE_S_MAX = 60.0
"""Time for a worker to verify another role: longer than all of its attempts."""
ADAPTER_S_MAX = 600.0
"""Time for all workers to load an adapter."""
AUTO = "auto"
NATS_DOWN = Refusal(status=503, message="The collector cannot reach NATS. Try again shortly.")
NOT_STORED = Refusal(
    status=503,
    message="NATS did not store the default mode. If its disk was full, restart it once there is space again.",
)

OnOrder = Callable[[str, str, bool], None]
"""Subject, text, and whether the order succeeded."""


class OrderHandler:
    """Executes each order once and reports the outcome as an event."""

    def __init__(self, bus: Bus, on_order: OnOrder) -> None:
        self._bus = bus
        self._on_order = on_order

    async def execute(self, order: Order) -> str | Refusal:
        """A sentence that says what was done, or why it was not."""
        if isinstance(order, DefaultMode):
            return await self._set_mode(order)
        if isinstance(order, OrderAdapter):
            return await self._change_adapter(order)
        try:
            result = await (self._drain(order) if isinstance(order, DrainWorker) else self._change_role(order))
        except NoResponders:
            result = Refusal(status=409, message=f"No worker with the id {order.worker_id} is running.")
        except AskTimedOut:
            result = Refusal(status=503, message=f"{order.worker_id} did not respond in time: see its log.")
        except AskRefused as error:
            result = Refusal(status=409, message=f"{order.worker_id} refused the order: {error.failure.message}")
        except BusError:
            result = NATS_DOWN
        if isinstance(result, Refusal):
            self._on_order(order.worker_id, f"an operator's order failed: {result.message}", False)
        return result

    async def _set_mode(self, order: DefaultMode) -> str | Refusal:
        try:
            store = await self._bus.key_value_store(DEFAULT_MODE)
            await store.put(order)
        except BusError:
            return NOT_STORED if self._bus.connected else NATS_DOWN
        text = f"the default mode is {order.mode} now"
        if order.mode == AUTO:
            text = "the default mode is auto now: placement chooses the mode of each request"
        self._on_order("routers", text, True)
        return f"{text[0].upper()}{text[1:]}."

    async def _change_adapter(self, order: OrderAdapter) -> str | Refusal:
        """The orchestrator publishes the result, which becomes the event."""
        try:
            result = await self._bus.ask(ORDER_ADAPTER, order, timeout_s=ADAPTER_S_MAX)
        except NoResponders:
            return Refusal(status=503, message="No orchestrator responds: it carries out orders about adapters.")
        except (AskTimedOut, AskRefused):
            return Refusal(status=503, message="The orchestrator did not carry out the order in time: see its log.")
        except BusError:
            return NATS_DOWN
        failed = [change for change in result.changes if change.failure]
        if result.refusal or failed:
            return Refusal(status=409, message=fleet_text.adapter_ordered(result))
        return f"{fleet_text.adapter_ordered(result)}."

    async def _drain(self, order: DrainWorker) -> str | Refusal:
        accepted = await self._bus.ask(DRAIN, order, timeout_s=ACCEPT_S_MAX)
        if accepted.refusal:
            return Refusal(status=409, message=f"{order.worker_id} refused the order: {accepted.refusal}")
        self._on_order(order.worker_id, "an operator ordered it to drain", True)
        return f"{fleet_text.draining(order.worker_id, None, evacuate=order.evacuate)}."

    async def _change_role(self, order: ChangeRole) -> str | Refusal:
        self._on_order(order.worker_id, f"an operator ordered it to become a {order.role.value} worker", True)
        changed = await self._bus.ask(CHANGE_ROLE, order, timeout_s=ROLE_S_MAX)
        if changed.failure:
            why = f"{changed.worker_id} remains a {changed.role.value} worker: {changed.failure}"
            return Refusal(status=409, message=why)
        return fleet_text.role_changed(changed)
