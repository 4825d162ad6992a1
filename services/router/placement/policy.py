"""What the operator allows a request: its class, priority, latency targets, and whether it may choose workers."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from services.router.placement.placement import PlacementRequest
from services.router.placement.revisions import NO_SHARES, Shares, read_shares
from services.router.placement.slo import NO_SLOS, NO_TARGETS, Slos, read_slos
from services.router.request.facts import Fault, ForcedWorkers, Mode, RequestFacts
from services.router.request.fields import PRIORITY_MAX
from services.router.request.head import Head
from services.router.request.mode import requested_mode
from services.router.settings import Settings
from shared.contracts.api_keys import NO_KEY, Key, Permission
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId, is_subject_token

CLASS_HEADER: Final = "x-baton-class"
TENANT_HEADER: Final = "x-baton-tenant"


class RequestPolicy:
    """The operator's settings of what clients may ask for."""

    def __init__(
        self, *, slos: Slos = NO_SLOS, shares: Shares = NO_SHARES, may_force: bool = False, keys_may_force: bool = True
    ) -> None:
        """``may_force``: whether clients without keys may choose workers; ``keys_may_force``: whether those may whose
        keys have the permission.
        """
        self.slos = slos
        self.shares = shares
        self.may_force = may_force
        self.keys_may_force = keys_may_force

    @classmethod
    def from_settings(cls, settings: Settings) -> RequestPolicy:
        """Raises ValueError with a message for the operator."""
        try:
            slos = read_slos(settings.slos)
        except ValueError as error:
            raise ValueError(f"ROUTER_SLOS: {error}") from error
        try:
            shares = read_shares(settings.revision_shares)
        except ValueError as error:
            raise ValueError(f"ROUTER_REVISION_SHARES: {error}") from error
        forcing = settings.force_placement
        return cls(
            slos=slos,
            shares=shares,
            may_force=forcing == "anyone" or (forcing == "auto" and settings.listens_locally),
            keys_may_force=forcing != "nobody",
        )

    def fault(self, facts: RequestFacts, head: Head, workers: Container[WorkerId]) -> Fault | None:
        """Why the request is not served; None when it is. ``workers``: those that exist."""
        options = facts.options
        if facts.fault is not None:
            return facts.fault
        if (fault := model_forbidden(head.client.key, facts)) is not None:
            return fault
        if (tenant := head.tenant_of_key()) and not is_subject_token(tenant):
            message = f"`{TENANT_HEADER}` must be up to 128 letters, digits, underscores and hyphens."
            return Fault(param=TENANT_HEADER, message=message)
        name = class_of(facts, head)
        if name and name not in self.slos.classes:
            known = ", ".join(self.slos.classes) or "none"
            param = "baton.class" if options.class_name is not None else CLASS_HEADER
            return Fault(param=param, message=f"The class `{name[:64]}` does not exist; there are: {known}.")
        if options.forced is not None and not self._may_force(head.client.key):
            message = "Clients may not choose workers and sources here."
            return Fault(param="baton", message=message, reason=Reason.FORBIDDEN)
        if options.forced is not None and (fault := unknown_worker(options.forced, workers)) is not None:
            return fault
        return self._too_urgent(facts, head.client.key)

    def _too_urgent(self, facts: RequestFacts, key: Key) -> Fault | None:
        """``priority`` is the engine's, where it has a priority scheduler, and ``baton.priority`` the router's."""
        priority_min = self.slos.priority_min if key.priority is None else key.priority
        of_engine = facts.body.priority if facts.body is not None else None
        for param, asked in (("baton.priority", facts.options.priority), ("priority", of_engine)):
            if type(asked) is int and asked < priority_min:
                message = f"`{param}` may be {priority_min} or more (less urgent) here."
                return Fault(param=param, message=message, reason=Reason.FORBIDDEN)
        return None

    def placement_request(
        self,
        facts: RequestFacts,
        head: Head,
        mode: Mode,
        prompt_tokens: int,
        hashes: Sequence[int],
        unsplittable: str = "",
    ) -> PlacementRequest:
        """``mode``: of the header, or the operator's default, which the body's own overrides. ``unsplittable``: why the
        prompt cannot be split, although the body can.
        """
        options, name = facts.options, class_of(facts, head)
        slos = self.slos
        priority = options.priority
        if priority is None:
            by_rule = slos.priority(facts.model, name) if slos is not NO_SLOS else 0
            priority = priority_of(head.client.key, name, by_rule)
        targets = NO_TARGETS
        if head.is_batch:
            priority = PRIORITY_MAX
        elif slos is not NO_SLOS or options.ttft_s is not None or options.itl_s is not None:
            targets = slos.targets(facts.model, name, ttft_s=options.ttft_s, itl_s=options.itl_s)
        return PlacementRequest(
            model=facts.model,
            mode=requested_mode(facts, mode),
            unsplittable=facts.unsplittable or unsplittable,
            prompt_tokens=prompt_tokens,
            hashes=hashes,
            tokens_out=facts.tokens_out,
            sequences=facts.sequences,
            fetch_tokens_min=facts.kv_fetch_min_tokens,
            cache_hit_threshold=facts.cache_hit_threshold,
            forced=options.forced,
            targets=targets,
            tenant=head.tenant_of_key(),
            priority=priority,
            revisions=self.shares.order(facts) if self.shares.models and options.forced is None else (),
        )

    def _may_force(self, key: Key) -> bool:
        if key is NO_KEY:
            return self.may_force
        return self.keys_may_force and key.may(Permission.FORCE_PLACEMENT)


def model_forbidden(key: Key, facts: RequestFacts) -> Fault | None:
    """Whether the key excludes this model. A key for the model is one for its aliases, not the other way round."""
    if not key.models or key.models & {facts.model, facts.alias}:
        return None
    message = f"This key is for the models {', '.join(sorted(key.models))}."
    return Fault(param="model", message=message, reason=Reason.FORBIDDEN)


def priority_of(key: Key, class_name: str, configured: int) -> int:
    """The priority of a request that asks for none: the key's, which a class may only make less urgent."""
    if key.priority is None:
        return configured
    return max(configured, key.priority) if class_name else key.priority


def unknown_worker(forced: ForcedWorkers, workers: Container[WorkerId]) -> Fault | None:
    """A fault for the first of them that does not exist."""
    named = [("prefill_worker", forced.prefill_worker), ("decode_worker", forced.decode_worker)]
    named += [("sources", source) for source in forced.sources or ()]
    for name, worker_id in named:
        if worker_id and worker_id not in workers:
            return Fault(param=f"baton.{name}", message=f"There is no worker `{worker_id}`.")
    return None


def class_of(facts: RequestFacts, head: Head) -> str:
    """From the body, or else from the header."""
    return head.class_name if facts.options.class_name is None else facts.options.class_name
