"""On what terms a request is served: who asks, how urgent it is, how soon is soon enough, what it may decide itself."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal

import msgspec

from services.router.auth.api_keys import NO_KEY, Key, Permission
from services.router.placement.placement import PlacementRequest
from services.router.placement.request_fields import Fault, Forced, Mode, RequestFacts, mode_of
from services.router.placement.revisions import NO_SHARES, Shares
from services.router.placement.slo import NO_SLOS, Slos, read_slos
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId, is_subject_token

CLASS_HEADER = "x-baton-class"
TENANT_HEADER = "x-baton-tenant"
WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0

Forcing = Literal["auto", "anyone", "nobody"]


class RequestHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """What the headers say, and what the key allows that came with them."""

    mode: Mode = Mode.AUTO
    class_name: str = ""
    tenant: str = ""
    key: Key = NO_KEY


class RequestPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator allows and promises."""

    slos: Slos = NO_SLOS
    shares: Shares = NO_SHARES
    may_force: bool = False
    """Whether clients without keys may choose workers."""
    keys_may_force: bool = True
    """Whether those may whose keys say so."""
    priority_min: int = 0
    """The most urgent that a body may say it is; classes may be more urgent."""

    def fault(self, facts: RequestFacts, request_headers: RequestHeaders, workers: Container[WorkerId]) -> Fault | None:
        """Why the request is not served on these terms; None when it is. ``workers``: those that there are."""
        wishes = facts.wishes
        if facts.fault is not None:
            return facts.fault
        if (fault := not_with(request_headers.key, facts.model)) is not None:
            return fault
        if request_headers.tenant and not is_subject_token(request_headers.tenant):
            message = f"`{TENANT_HEADER}` must be up to 128 letters, digits, underscores and hyphens."
            return Fault(param=TENANT_HEADER, message=message)
        name = class_of(facts, request_headers)
        if not self.slos.knows(name):
            known = ", ".join(self.slos.classes) or "none"
            param = "baton.class" if wishes.class_name is not None else CLASS_HEADER
            return Fault(param=param, message=f"The class `{name[:64]}` does not exist; there are: {known}.")
        if wishes.forced is not None and not self._may_force(request_headers.key):
            message = "Workers and sources are not the client's to choose here."
            return Fault(param="baton", message=message, reason=Reason.FORBIDDEN)
        if wishes.forced is not None and (fault := unknown_worker(wishes.forced, workers)) is not None:
            return fault
        priority_min = self.priority_min if request_headers.key.priority is None else request_headers.key.priority
        if wishes.priority is not None and wishes.priority < priority_min:
            message = f"`baton.priority` may be {priority_min} or more (less urgent) here."
            return Fault(param="baton.priority", message=message, reason=Reason.FORBIDDEN)
        return None

    def need(
        self, facts: RequestFacts, request_headers: RequestHeaders, prompt_tokens: int, hashes: Sequence[int]
    ) -> PlacementRequest:
        """What the request needs of its workers."""
        wishes, name = facts.wishes, class_of(facts, request_headers)
        slos = self.slos
        priority = wishes.priority
        if priority is None:
            priority = priority_of(request_headers.key, name, slos.priority(facts.model, name))
        return PlacementRequest(
            model=facts.model,
            mode=mode_of(facts, request_headers.mode),
            whole=facts.whole,
            prompt_tokens=prompt_tokens,
            hashes=hashes,
            tokens_out=facts.tokens_out,
            fetch_tokens_min=facts.kv_fetch_min_tokens,
            cache_hit_threshold=facts.cache_hit_threshold,
            forced=wishes.forced,
            targets=slos.targets(facts.model, name, ttft_s=wishes.ttft_s, itl_s=wishes.itl_s),
            tenant=request_headers.tenant,
            priority=priority,
            revisions=self.shares.order(facts) if wishes.forced is None else (),
        )

    def _may_force(self, key: Key) -> bool:
        if key is NO_KEY:
            return self.may_force
        return self.keys_may_force and key.may(Permission.FORCE_PLACEMENT)


def not_with(key: Key, model: str) -> Fault | None:
    """Why the key is not for this model; None when it is."""
    if not key.models or model in key.models:
        return None
    message = f"This key is for the models {', '.join(sorted(key.models))}."
    return Fault(param="model", message=message, reason=Reason.FORBIDDEN)


def priority_of(key: Key, class_name: str, said: int) -> int:
    """Of a request that asks for none. A key's own counts, and a class makes its requests less urgent only."""
    if key.priority is None:
        return said
    return max(said, key.priority) if class_name else key.priority


def unknown_worker(forced: Forced, workers: Container[WorkerId]) -> Fault | None:
    """The first of them that does not exist."""
    asked = [("prefill_worker", forced.prefill_worker), ("decode_worker", forced.decode_worker)]
    asked += [("sources", source) for source in forced.sources or ()]
    for name, worker_id in asked:
        if worker_id and worker_id not in workers:
            return Fault(param=f"baton.{name}", message=f"There is no worker `{worker_id}`.")
    return None


def class_of(facts: RequestFacts, request_headers: RequestHeaders) -> str:
    """The body's word counts before the header's."""
    return request_headers.class_name if facts.wishes.class_name is None else facts.wishes.class_name


def read_policy_fields(slos: str, forcing: Forcing, priority_min: int, *, local: bool) -> RequestPolicy:
    """The operator's terms; ``local``: only clients of this machine can ask. Raises ValueError in words for the
    operator.
    """
    return RequestPolicy(
        slos=read_slos(slos),
        may_force=forcing == "anyone" or (forcing == "auto" and local),
        keys_may_force=forcing != "nobody",
        priority_min=priority_min,
    )


def read_weights(text: str) -> dict[str, float]:
    """Tenants' weights from the operator's JSON. Raises ValueError in words for the operator."""
    try:
        weights = msgspec.json.decode(text.encode() or b"{}", type=dict[str, float])
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    for tenant, weight in weights.items():
        if tenant and not is_subject_token(tenant):
            raise ValueError(f"{tenant!r} cannot be a tenant: use letters, digits, underscores and hyphens")
        if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            raise ValueError(f"the weight of {tenant} is {weight:g}; it must be {WEIGHT_MIN:g} to {WEIGHT_MAX:g}")
    return weights
