"""All policies by name, each with the settings it is published with, and the sweep of its main knob."""

from __future__ import annotations

from collections.abc import Callable

from replay.policies.base import Surroundings
from replay.policies.dynamo import DynamoKvCost
from replay.policies.llm_d import LlmDScorer
from replay.policies.mooncake import MooncakeConductor
from replay.policies.sglang import Knobs, SglangCacheAware
from replay.policies.simple import LeastLoaded, PowerOfTwo, RandomChoice, RoundRobin
from services.router.core.placer import Placer

BATON = "baton"
ORACLE = "oracle"
Make = Callable[[Surroundings], Placer]

BASELINES: dict[str, Make] = {
    "random": RandomChoice,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwo,
    "sglang": SglangCacheAware,
    "sglang-exact": lambda around: SglangCacheAware(around, Knobs(exact=True)),
    "dynamo": DynamoKvCost,
    "llm-d": LlmDScorer,
    "mooncake": MooncakeConductor,
    "mooncake-rejecting": lambda around: MooncakeConductor(around, rejecting=True),
}
SWEEPS: dict[str, dict[str, Make]] = {
    "sglang": {
        f"sglang[abs={value}]": (lambda around, value=value: SglangCacheAware(around, Knobs(balance_abs=value)))
        for value in (0, 2, 8, 32)
    }
    | {
        f"sglang[threshold={value}]": (
            lambda around, value=value: SglangCacheAware(around, Knobs(cache_threshold=value))
        )
        for value in (0.1, 0.5, 0.8)
    },
    "sglang-exact": {
        f"sglang-exact[abs={value}]": (
            lambda around, value=value: SglangCacheAware(around, Knobs(balance_abs=value, exact=True))
        )
        for value in (0, 2, 8, 32)
    },
    "dynamo": {
        f"dynamo[scale={value}]": (lambda around, value=value: DynamoKvCost(around, prefill_load_scale=value))
        for value in (0.5, 2.0, 4.0, 8.0)
    }
    | {
        f"dynamo[credit={value}]": (lambda around, value=value: DynamoKvCost(around, credit=value))
        for value in (0.5, 2.0)
    },
    "llm-d": {
        f"llm-d[prefix={value}]": (lambda around, value=value: LlmDScorer(around, prefix=value))
        for value in (1.0, 2.0, 5.0, 10.0)
    },
    "mooncake": {
        f"mooncake[threshold={value}]": (lambda around, value=value: MooncakeConductor(around, threshold=value))
        for value in (1.5, 2.0, 4.0)
    },
}
