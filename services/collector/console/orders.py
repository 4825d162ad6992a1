"""What an operator may have done at the console, and who counts as one."""

from __future__ import annotations

import msgspec

from shared.contracts.fleet_orders import ChangeRole, DrainWorker
from shared.contracts.ids import WorkerId, is_subject_token
from shared.contracts.routing import DEFAULT_MODES, DefaultMode
from shared.contracts.workers import Role

ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)
"""That a worker with an engine may be given."""
DRAIN_S_MAX = 86400.0
LOOPBACK_ONLY = (
    "Nobody may act here: the console is not on loopback and has no admin key. Give its process the file of one "
    "(COLLECTOR_ADMIN_KEY_FILE), or use the `baton` command."
)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why not, for whoever asked."""

    status: int
    message: str


class DrainWish(msgspec.Struct, frozen=True, kw_only=True, tag_field="action", tag="drain", forbid_unknown_fields=True):
    """A worker shall leave."""

    worker_id: str
    deadline_s: float | None = None


class RoleWish(msgspec.Struct, frozen=True, kw_only=True, tag_field="action", tag="role", forbid_unknown_fields=True):
    """A worker shall be placed for other legs."""

    worker_id: str
    role: Role


class ModeWish(msgspec.Struct, frozen=True, kw_only=True, tag_field="action", tag="mode", forbid_unknown_fields=True):
    """Requests that ask for no mode shall be served so."""

    mode: str


Order = DrainWorker | ChangeRole | DefaultMode
WISH = msgspec.json.Decoder(DrainWish | RoleWish | ModeWish)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of whoever gives an order."""

    on_loopback: bool
    """Only this machine can reach the console."""
    names_loopback: bool
    """The address that the browser was given is this machine's own: a page of another site that has its name point here
    cannot say so.
    """
    key_exists: bool
    """There is an admin key."""
    key_given: bool
    key_fits: bool


def refusal_of(standing: Standing) -> Refusal | None:
    """Why this one may give no orders; None when it may."""
    if standing.key_exists:
        if standing.key_fits:
            return None
        wrong = "That is not the admin key." if standing.key_given else "This needs the admin key."
        return Refusal(status=401, message=wrong)
    if not standing.on_loopback:
        return Refusal(status=403, message=LOOPBACK_ONLY)
    if not standing.names_loopback:
        return Refusal(status=403, message="Without an admin key, open the console by 127.0.0.1 or localhost to act.")
    return None


def order_of(body: bytes) -> Order | Refusal:
    """What shall be done."""
    try:
        wish = WISH.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Refusal(status=400, message=f"That is no order: {error}.")
    if isinstance(wish, ModeWish):
        if wish.mode not in DEFAULT_MODES:
            return Refusal(status=400, message=f"`mode` must be one of {', '.join(DEFAULT_MODES)}.")
        return DefaultMode(mode=wish.mode)
    if not is_subject_token(wish.worker_id):
        return Refusal(status=400, message="`worker_id` is no worker's id: see the list of workers.")
    worker_id = WorkerId(wish.worker_id)
    if isinstance(wish, DrainWish):
        if wish.deadline_s is not None and not 0 <= wish.deadline_s <= DRAIN_S_MAX:
            return Refusal(status=400, message=f"`deadline_s` must be 0 to {DRAIN_S_MAX:g} seconds.")
        return DrainWorker(worker_id=worker_id, deadline_s=wish.deadline_s)
    if wish.role not in ROLES:
        return Refusal(status=400, message="`role` must be prefill, decode or both.")
    return ChangeRole(worker_id=worker_id, role=wish.role)
