"""Latency targets and the priority of a request, by its model and its class."""

from __future__ import annotations

import math

import msgspec

from services.router.request.fields import (
    PRIORITY_MAX,
    PRIORITY_MIN,
    TARGET_S_MAX,
    TARGET_S_MIN,
    is_priority,
    is_target,
)

NO_TARGET = math.inf
CLASSES_MAX = 64
"""The maximum number of classes: operators look at a line for each."""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Targets in seconds; infinite where there is none."""

    ttft_s: float = NO_TARGET
    """Seconds from the request to its first token."""
    itl_s: float = NO_TARGET
    """Seconds between two tokens after the first."""


NO_TARGETS = Targets()


class SloRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Targets and priority of one model or class. Left out: the more general rule holds; null: no target."""

    ttft_s: float | msgspec.UnsetType | None = msgspec.UNSET
    itl_s: float | msgspec.UnsetType | None = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET


NO_RULE = SloRule()


class Slos(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class's rule overrides its model's, and a model's rule the default."""

    default: SloRule = NO_RULE
    models: dict[str, SloRule] = {}
    classes: dict[str, SloRule] = {}
    priority_min: int = 0
    """The most urgent priority that a body may ask for; classes may be more urgent."""
    serve_late: bool = True
    """Whether a request whose target even an idle worker would miss is served under low load, or always refused."""

    def targets(self, model: str, name: str, *, ttft_s: float | None, itl_s: float | None) -> Targets:
        """For a request of this model and class; ``ttft_s`` and ``itl_s`` are its own and override them."""
        rules = self._by_precedence(model, name)
        return Targets(
            ttft_s=_target(ttft_s, [one.ttft_s for one in rules]), itl_s=_target(itl_s, [one.itl_s for one in rules])
        )

    def priority(self, model: str, name: str) -> int:
        """Lower is more urgent; 0 by default."""
        for rule in self._by_precedence(model, name):
            if rule.priority is not msgspec.UNSET:
                return rule.priority
        return 0

    def _by_precedence(self, model: str, name: str) -> tuple[SloRule, SloRule, SloRule]:
        """The most specific rule first."""
        return self.classes.get(name, NO_RULE), self.models.get(model, NO_RULE), self.default


NO_SLOS = Slos()


def read_slos(text: str) -> Slos:
    """From the operator's JSON; no rules when empty. Raises ValueError with a message for the operator."""
    if not text.strip():
        return NO_SLOS
    try:
        slos = msgspec.json.decode(text.encode(), type=Slos)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if len(slos.classes) > CLASSES_MAX:
        raise ValueError(f"there are {len(slos.classes)} classes, {CLASSES_MAX} are the maximum")
    if "" in slos.classes or "" in slos.models:
        raise ValueError("a class or a model has an empty name; the rule for all others is `default`")
    named = {"default": slos.default}
    named |= {f"models.{name}": rule for name, rule in slos.models.items()}
    named |= {f"classes.{name}": rule for name, rule in slos.classes.items()}
    for name, rule in named.items():
        _check(name, rule)
    return slos


def _check(name: str, rule: SloRule) -> None:
    for field in ("ttft_s", "itl_s"):
        value = getattr(rule, field)
        if value not in (msgspec.UNSET, None) and not is_target(value):
            raise ValueError(f"{name}.{field} is {value}; it must be {TARGET_S_MIN:g} to {TARGET_S_MAX:g} s, or null")
    if rule.priority is not msgspec.UNSET and not is_priority(rule.priority):
        raise ValueError(f"{name}.priority is {rule.priority}; it must be {PRIORITY_MIN} to {PRIORITY_MAX}")


def _target(requested: float | None, configured: list[float | msgspec.UnsetType | None]) -> float:
    if requested is not None:
        return requested
    for value in configured:
        if value is not msgspec.UNSET:
            return NO_TARGET if value is None else value
    return NO_TARGET
