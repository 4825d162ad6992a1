"""Policies by name: a placement rule, optionally a queue and refusal, and values of parameters.

    NAME = RULE[+fcfs|+sjf|+edf][+refuse]["[" parameter=value, ... "]"]

``mooncake`` places at once and serves all; ``mooncake+edf+refuse[margin=0.7,room=2]`` waits in a queue by deadline and
refuses. ``baton`` is Baton's own rule, with targets. Systems with a queue or refusal of their own (``SHIPPED``) take no
suffix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.policies import BATON, BATON_DEFAULT, BATON_NO_TARGETS, BATON_STRICT, BATON_WAITING, ORACLE
from bench.policies.base import Baseline, LeastLoaded, PolicyContext, PowerOfTwo, RandomChoice, RoundRobin
from bench.policies.oracle import Oracle
from bench.policies.other_systems import DynamoKvCost, LlmDScorer, LlmDSticky, MooncakeConductor
from bench.policies.queueing import (
    BusyGate,
    GatedQueue,
    OpenGate,
    Order,
    QueueContext,
    Queueing,
    Refusal,
    RoomGate,
    SaturationGate,
)
from bench.policies.routed_prompts import ProductionStack, SglangCacheAware, SglangExact, VllmRouter
from bench.policies.world import PolicyWorld
from services.router.admission.policy import AdmissionPolicy
from services.router.placement.placement import PlacementPolicy
from services.router.placement.placer import CostPlacer, Placer
from services.router.placement.slo import Targets

FLOW_QUEUE_S_MAX = 60.0
"""llm-d's default request TTL (``pkg/epp/flowcontrol/controller/config.go``)."""

Values = Mapping[str, float]
Make = Callable[..., Placer]


class UnknownPolicyError(ValueError):
    """There is no such policy or parameter; the message says which there are."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A documented main parameter: its default, and the values that tuning tries."""

    default: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A placement rule and its parameters, by the names that its constructor takes."""

    make: Callable[..., Baseline]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


BALANCE = {"abs": Parameter(64, (0, 1, 2, 4, 8, 16, 32, 64)), "rel": Parameter(1.5, (1.0, 1.1, 1.5, 2.0))}
CACHE_AWARE = {"threshold": Parameter(0.3, (0.1, 0.2, 0.3, 0.5, 0.8)), **BALANCE}
DYNAMO = {
    "scale": Parameter(1.0, (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)),
    "credit": Parameter(1.0, (0.5, 1.0, 1.5, 2.0)),
    "decay": Parameter(0.0, (0.0, 0.5, 1.0, 2.0)),
}
STICKY = {
    "affinity": Parameter(0.8, (0.2, 0.4, 0.6, 0.8)),
    "penalty_s": Parameter(18.0, (0.5, 1.0, 2.0, 4.0, 8.0, 18.0)),
}
MARGIN = Parameter(1.0, (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0))
RULES: dict[str, Rule] = {
    "random": Rule(RandomChoice),
    "round-robin": Rule(RoundRobin),
    "least-loaded": Rule(LeastLoaded),
    "power-of-two": Rule(PowerOfTwo),
    "sglang": Rule(SglangCacheAware, CACHE_AWARE),
    "sglang-exact": Rule(SglangExact, BALANCE),
    "vllm-router": Rule(VllmRouter, CACHE_AWARE),
    "production-stack": Rule(ProductionStack, {"tokens_min": Parameter(0, (0, 512, 1024, 2048, 4096, 8192))}),
    "dynamo": Rule(DynamoKvCost, DYNAMO),
    "llm-d": Rule(
        LlmDScorer,
        {
            "prefix": Parameter(3.0, (0.5, 1.0, 2.0, 3.0, 5.0, 10.0)),
            "queue": Parameter(2.0, (0.0, 1.0, 2.0, 4.0)),
            "utilisation": Parameter(2.0, (0.0, 1.0, 2.0, 4.0)),
        },
    ),
    "llm-d-sticky": Rule(LlmDSticky, STICKY),
    "mooncake": Rule(MooncakeConductor, {"threshold": Parameter(1.0, (1.0, 1.5, 2.0, 4.0, 8.0))}),
}
"""Rules of other systems that can be combined with a queue and refusal, as Baton's can."""
QUEUE = {"room": Parameter(2.0, (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0))}
DEADLINE = {"own_weight": Parameter(1.0, (0.0, 0.5, 1.0, 2.0, 4.0))}
OWN: dict[str, Parameter] = {
    # Documented settings of a Baton router: ROUTER_FETCH_TOKENS_MIN and ROUTER_STREAM_TOKENS_MIN, and the targets of
    # ROUTER_SLOS as a share of those that are measured.
    "fetch_tokens_min": Parameter(256, (64, 256, 1024, 4096)),
    "stream_tokens_min": Parameter(0, (0, 1024, 4096)),
    "slo_share": Parameter(1.0, (0.5, 0.7, 0.85, 1.0, 1.2)),
}
OWN_UNTOLD = {name: OWN[name] for name in ("fetch_tokens_min", "stream_tokens_min")}
QUEUE_S_MAX = {"queue_s_max": Parameter(60.0, (5.0, 15.0, 60.0))}
"""ROUTER_QUEUE_S_MAX."""
SHIPPED: dict[str, dict[str, Parameter]] = {
    "dynamo-queue": {**DYNAMO, "busy": Parameter(2.0, (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)), "wspt": Parameter(0, (0, 1))},
    "llm-d-flow": {
        **STICKY,
        "queue_depth": Parameter(5, (1, 2, 5, 10)),
        "kv_utilisation": Parameter(0.8, (0.6, 0.8, 0.95)),
    },
    "mooncake-rejecting": {**RULES["mooncake"].parameters, "margin": MARGIN},
    BATON_WAITING: {**OWN, **QUEUE_S_MAX},
    BATON_STRICT: {**OWN, **QUEUE_S_MAX},
    BATON_DEFAULT: {**OWN_UNTOLD, **QUEUE_S_MAX},
    BATON_NO_TARGETS: OWN_UNTOLD,
    ORACLE: {},
}
"""Systems with the queue and refusal of their project, and Baton's own admission. ``busy`` is Dynamo's
``--router-queue-threshold`` (no queue by default; the value here when there is one) and ``wspt`` its
``--router-queue-policy``.
"""
BASELINES: dict[str, Make] = {
    **{name: rule.make for name, rule in RULES.items()},
    "mooncake-rejecting": lambda context: MooncakeConductor(context, margin=1.0),
}
"""Placers alone, with published settings."""
FORM = re.compile(
    r"(?P<rule>[a-z-]+)(\+(?P<order>fcfs|sjf|edf))?(?P<refuse>\+refuse)?(\[(?P<values>[a-z_]+=[-\d.e]+(,[a-z_]+=[-\d.e]+)*)\])?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A policy by its parts."""

    rule: str
    """Key of ``RULES`` or of ``SHIPPED``, or ``baton``."""
    order: Order | None = None
    """None: requests are placed at once."""
    refuse: bool = False
    values: Values = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """All that can be set, with defaults."""
        if self.rule in SHIPPED:
            return SHIPPED[self.rule]
        of_rule = OWN if self.rule == BATON else RULES[self.rule].parameters
        queue = {**(QUEUE if self.order else {}), **(DEADLINE if self.order is Order.DEADLINE else {})}
        return {**of_rule, **queue, **({"margin": MARGIN} if self.refuse else {})}

    def value(self, name: str) -> float:
        """As set, or the default."""
        return self.values.get(name, self.parameters[name].default)

    def named(self, values: Values) -> str:
        """The name of this system with other values."""
        parts = [self.rule, *([self.order] if self.order else []), *(["refuse"] if self.refuse else [])]
        given = ",".join(f"{name}={value:g}" for name, value in sorted(values.items()))
        return "+".join(parts) + (f"[{given}]" if given else "")


def parse(name: str) -> System:
    """Read a policy's name; raises UnknownPolicyError."""
    found = FORM.fullmatch(name)
    if found is None or (found["rule"] not in RULES and found["rule"] not in SHIPPED and found["rule"] != BATON):
        raise UnknownPolicyError(f"There is no policy {name!r}. Policies: {', '.join(names())}.")
    order = Order(found["order"]) if found["order"] else None
    values = dict(part.split("=") for part in (found["values"] or "").split(",") if part)
    system = System(
        rule=found["rule"],
        order=order,
        refuse=bool(found["refuse"]),
        values={key: float(value) for key, value in values.items()},
    )
    if system.rule in SHIPPED and (system.order or system.refuse):
        raise UnknownPolicyError(f"{system.rule} has its own queue and refusal; {name!r} asks for another.")
    unknown = system.values.keys() - system.parameters.keys()
    if unknown:
        known = ", ".join(system.parameters) or "none"
        raise UnknownPolicyError(f"{name!r}: no parameter {', '.join(sorted(unknown))}. Parameters: {known}.")
    return system


def names() -> list[str]:
    """All policies without queue, refusal and values."""
    own = [BATON, BATON_WAITING, BATON_STRICT, BATON_DEFAULT, BATON_NO_TARGETS]
    return [*own, *RULES, *(name for name in SHIPPED if name not in {*own, ORACLE}), ORACLE]


def sweep_of(name: str) -> list[str]:
    """The policy with each value of each of its parameters, one at a time."""
    system = parse(name)
    return [
        system.named({**system.values, key: value})
        for key, parameter in system.parameters.items()
        for value in parameter.values
        if value != system.value(key)
    ]


def make_rule(name: str) -> Make:
    """The placer of a policy without a queue, for other worlds than the replay's; raises UnknownPolicyError."""
    system = parse(name)
    if system.rule not in BASELINES or system.order or system.refuse:
        raise UnknownPolicyError(f"{name} is no placement rule alone.")
    return lambda context: _rule(system, context)


def _rule(system: System, context: PolicyContext) -> Placer:
    margin = {"margin": system.value("margin")} if system.rule == "mooncake-rejecting" else {}
    shipped = {"dynamo-queue": "dynamo", "llm-d-flow": "llm-d-sticky", "mooncake-rejecting": "mooncake"}
    rule = RULES[shipped.get(system.rule, system.rule)]
    values = {key: system.values[key] for key in rule.parameters if key in system.values}
    return rule.make(context, **{"abs_" if key == "abs" else key: value for key, value in values.items()}, **margin)


def install(world: PolicyWorld, name: str, context: PolicyContext) -> None:
    """Make a policy the world's; raises UnknownPolicyError."""
    system = parse(name)
    targets = Targets(ttft_s=context.slo_ttft_s, itl_s=context.slo_itl_s)
    if system.rule in {BATON, BATON_WAITING, BATON_STRICT, BATON_DEFAULT, BATON_NO_TARGETS}:
        _install_baton(world, system, targets)
    elif system.rule == ORACLE:
        world.fleet.placer = Oracle(world)
    else:
        world.fleet.placer = _rule(system, context)
        world.ignore_speeds()
    around = QueueContext(fleet=world.fleet, counts=world.counts, profile=context.profile, targets=targets)
    queueing = _queueing(system, around)
    if queueing is not None:
        world.queue(lambda at, decided: GatedQueue(around, queueing, at, decided))


def _install_baton(world: PolicyWorld, system: System, targets: Targets) -> None:
    fleet = world.fleet
    fleet.policy = PlacementPolicy(
        silent_s_max=fleet.policy.silent_s_max,
        fetch_tokens_min=int(system.value("fetch_tokens_min")),
        stream_tokens_min=int(system.value("stream_tokens_min")),
    )
    fleet.placer = CostPlacer(fleet.cluster, fleet.index, fleet.policy)
    if system.rule not in {BATON_DEFAULT, BATON_NO_TARGETS}:
        share = system.value("slo_share")
        world.targets = Targets(ttft_s=share * targets.ttft_s, itl_s=share * targets.itl_s)
    if system.rule not in {BATON, BATON_NO_TARGETS}:
        policy = AdmissionPolicy(serve_late=system.rule != BATON_STRICT, queue_s_max=system.value("queue_s_max"))
        world.admit(policy)


def _queueing(system: System, context: QueueContext) -> Queueing | None:
    """Its queue and refusal; None if requests are placed at once and all are served."""
    if system.rule == "dynamo-queue":
        order = Order.UNCACHED if system.value("wspt") else Order.FIRST_COME
        return Queueing(gate=BusyGate(context, system.value("busy")), order=order)
    if system.rule == "llm-d-flow":
        saturation = SaturationGate(context, system.value("queue_depth"), system.value("kv_utilisation"))
        return Queueing(gate=saturation, queue_s_max=FLOW_QUEUE_S_MAX)
    refusal = Refusal(context, system.value("margin")) if system.refuse else None
    if system.order is None:
        return Queueing(gate=OpenGate(context), refusal=refusal) if refusal is not None else None
    own_weight = system.value("own_weight") if system.order is Order.DEADLINE else 0.0
    gate = RoomGate(context, system.value("room"))
    return Queueing(gate=gate, order=system.order, own_weight=own_weight, refusal=refusal)
