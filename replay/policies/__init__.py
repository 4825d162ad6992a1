"""Placement policies by name: Baton's, and those of other systems with their published settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from replay.policies.base import LeastLoaded, PolicyContext, PowerOfTwo, RandomChoice, RoundRobin
from replay.policies.other_systems import DynamoKvCost, LlmDScorer, MooncakeConductor, Parameters, SglangCacheAware
from services.router.placement.placer import Placer

BATON = "baton"
"""Placement alone: each request goes to its worker at once, as with the baselines."""
BATON_STRICT = "baton-strict"
"""With admission; rejects requests that even an idle worker would serve too late."""
BATON_WAITING = "baton-waiting"
"""With admission: requests that no engine would start soon wait in the router, or are rejected."""
ORACLE = "oracle"
Make = Callable[[PolicyContext], Placer]

BASELINES: dict[str, Make] = {
    "random": RandomChoice,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwo,
    "sglang": SglangCacheAware,
    "sglang-exact": partial(SglangCacheAware, parameters=Parameters(exact=True)),
    "dynamo": DynamoKvCost,
    "llm-d": LlmDScorer,
    "mooncake": MooncakeConductor,
    "mooncake-rejecting": partial(MooncakeConductor, rejecting=True),
}
SWEEPS: dict[str, dict[str, Make]] = {
    "sglang": {
        **{f"sglang[abs={n}]": partial(SglangCacheAware, parameters=Parameters(balance_abs=n)) for n in (0, 2, 8, 32)},
        **{
            f"sglang[threshold={x}]": partial(SglangCacheAware, parameters=Parameters(cache_threshold=x))
            for x in (0.1, 0.5, 0.8)
        },
    },
    "sglang-exact": {
        f"sglang-exact[abs={n}]": partial(SglangCacheAware, parameters=Parameters(balance_abs=n, exact=True))
        for n in (0, 2, 8, 32)
    },
    "dynamo": {
        **{f"dynamo[scale={x}]": partial(DynamoKvCost, prefill_load_scale=x) for x in (0.5, 2.0, 4.0, 8.0, 16.0)},
        **{f"dynamo[credit={x}]": partial(DynamoKvCost, credit=x) for x in (0.5, 2.0)},
    },
    "llm-d": {f"llm-d[prefix={x}]": partial(LlmDScorer, prefix=x) for x in (0.5, 1.0, 2.0, 5.0, 10.0)},
    "mooncake": {f"mooncake[threshold={x}]": partial(MooncakeConductor, threshold=x) for x in (1.5, 2.0, 4.0)},
}
