"""How soon is soon enough: targets for latency and the priority of a request, by its model and its class."""

from __future__ import annotations

import math
from typing import Any

import msgspec

NONE = math.inf
"""No target."""
TARGET_S_MIN = 0.001
TARGET_S_MAX = 86_400.0
PRIORITY_MIN, PRIORITY_MAX = -1000, 1000
CLASSES_MAX = 64
"""Each is a line for operators to look at."""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """What the client should experience, in seconds; infinite where nothing was promised."""

    ttft_s: float = NONE
    """From the request to its first token."""
    itl_s: float = NONE
    """Between two tokens after the first."""


NO_TARGETS = Targets()


class Promise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator says of one model or class. Left out: as the more general ones say; null: no target."""

    ttft_s: float | msgspec.UnsetType | None = msgspec.UNSET
    itl_s: float | msgspec.UnsetType | None = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET


NOTHING_SAID = Promise()


class Slos(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it. The class says more than the model, and the model more than the default."""

    default: Promise = NOTHING_SAID
    models: dict[str, Promise] = msgspec.field(default_factory=dict)
    classes: dict[str, Promise] = msgspec.field(default_factory=dict)

    def knows(self, name: str) -> bool:
        """Whether requests may be of that class; of none (empty) they always may."""
        return not name or name in self.classes

    def targets(self, model: str, name: str, *, ttft_s: float | None, itl_s: float | None) -> Targets:
        """What holds for a request of this model and class, unless it says better itself."""
        promises = self._by_weight(model, name)
        return Targets(
            ttft_s=_target(ttft_s, *(one.ttft_s for one in promises)),
            itl_s=_target(itl_s, *(one.itl_s for one in promises)),
        )

    def priority(self, model: str, name: str) -> int:
        """Lower is more urgent; 0 where nobody says anything."""
        for promise in self._by_weight(model, name):
            if promise.priority is not msgspec.UNSET:
                return promise.priority
        return 0

    def _by_weight(self, model: str, name: str) -> tuple[Promise, Promise, Promise]:
        """Who has the first word comes first."""
        return self.classes.get(name, NOTHING_SAID), self.models.get(model, NOTHING_SAID), self.default


NO_SLOS = Slos()


def read_slos(text: str) -> Slos:
    """Slos from the operator's JSON; none of it when empty. Raises ValueError in words for the operator."""
    if not text.strip():
        return NO_SLOS
    try:
        slos = msgspec.json.decode(text.encode(), type=Slos)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if len(slos.classes) > CLASSES_MAX:
        raise ValueError(f"there are {len(slos.classes)} classes, {CLASSES_MAX} at most make sense")
    if "" in slos.classes or "" in slos.models:
        raise ValueError("a class or a model has an empty name; what holds for all others stands under `default`")
    named = {"default": slos.default}
    named |= {f"models.{name}": promise for name, promise in slos.models.items()}
    named |= {f"classes.{name}": promise for name, promise in slos.classes.items()}
    for name, promise in named.items():
        _check(name, promise)
    return slos


def is_target(value: Any) -> bool:
    """Whether it can be a target in seconds."""
    return type(value) in (int, float) and TARGET_S_MIN <= value <= TARGET_S_MAX


def is_priority(value: Any) -> bool:
    """Whether it can be a priority."""
    return type(value) is int and PRIORITY_MIN <= value <= PRIORITY_MAX


def _check(name: str, promise: Promise) -> None:
    for field in ("ttft_s", "itl_s"):
        value = getattr(promise, field)
        if value not in (msgspec.UNSET, None) and not is_target(value):
            raise ValueError(f"{name}.{field} is {value}; it must be {TARGET_S_MIN:g} to {TARGET_S_MAX:g} s, or null")
    if promise.priority is not msgspec.UNSET and not is_priority(promise.priority):
        raise ValueError(f"{name}.priority is {promise.priority}; it must be {PRIORITY_MIN} to {PRIORITY_MAX}")


def _target(asked: float | None, *said: float | msgspec.UnsetType | None) -> float:
    if asked is not None:
        return asked
    for value in said:
        if value is not msgspec.UNSET:
            return NONE if value is None else value
    return NONE
