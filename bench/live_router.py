"""A router process with a placement policy of the replay: ``python -m bench.live_router POLICY SETTING``. ``baton-default`` and
``baton-waiting`` are the router as it is, without targets and with targets in ``ROUTER_SLOS``.

Everything but placement is the router's own: the bus, the index, the load reports, the legs, the relay. What baselines
count by themselves (legs sent and not yet ended) is read from the router's own records of them.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import msgspec

from bench.policies import BATON_DEFAULT, BATON_WAITING
from bench.policies.base import TOKENS_OUT_UNKNOWN, PolicyContext
from bench.policies.systems import make_rule
from bench.policies.world import Active
from replay.profile import PROFILES
from services.router.placement.fleet import Fleet
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.placer import Placer
from services.router.service import Router, run
from services.router.settings import Settings
from services.router.telemetry.tracing import Tracing
from shared.contracts.ids import WorkerId
from shared.http.server import listen
from shared.runtime.service import Service, run_service
from shared.runtime.settings import load, load_common

AS_IT_IS = (BATON_DEFAULT, BATON_WAITING)


class LiveSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy is made with, from the command line as JSON."""

    profile: str
    slo_ttft_s: float
    slo_itl_s: float
    seed: int


class LiveCounts:
    """The replay's ``RequestCounts``, as far as policies read them. ``predicted_s`` is what was predicted of the newest placement."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.replayed: Any = SimpleNamespace(number=0)
        self.predicted_s: dict[int, float] = {}
        self.prefills: defaultdict[WorkerId, deque[tuple[int, float]]] = defaultdict(deque)
        """Prompts sent to a worker: tokens to compute, and predicted seconds."""

    @property
    def active(self) -> LiveCounts:
        return self

    def __getitem__(self, worker_id: WorkerId) -> Active:
        own = self._fleet.cluster.workers[worker_id].own
        sent = self.prefills[worker_id]
        while sent and sum(tokens for tokens, _ in sent) > own.tokens:  # prompts are computed in their order
            sent.popleft()
        return Active(
            requests=own.legs,
            prefill_tokens=own.tokens,
            prefill_s=sum(seconds for _, seconds in sent),
            context_tokens=max(0, own.context_tokens - own.legs * TOKENS_OUT_UNKNOWN),
        )


class Replayed:
    """A ``Placer``: one of the replay's."""

    def __init__(self, policy: str, fleet: Fleet, setting: LiveSetting) -> None:
        self._counts = LiveCounts(fleet)
        around = PolicyContext(
            fleet=fleet,
            counts=self._counts,
            profile=PROFILES[setting.profile],
            slo_ttft_s=setting.slo_ttft_s,
            slo_itl_s=setting.slo_itl_s,
            seed=setting.seed,
        )
        self._policy: Placer = make_rule(policy)(around)

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        outcome = self._policy.place(request, now)
        predicted_s = self._counts.predicted_s.pop(0, 0.0)
        if isinstance(outcome, Placement):
            computing = outcome.prefill or outcome.decode
            self._counts.prefills[computing.record.worker_id].append((outcome.uncached_tokens, predicted_s))
        return outcome


def main() -> None:
    policy, setting = sys.argv[1], msgspec.json.decode(sys.argv[2], type=LiveSetting)
    common, settings = load_common(), load(Settings, "ROUTER_")
    listener = listen(settings.host, settings.port)

    async def serve(service: Service) -> None:
        router = Router(settings, service.bus, service.clock, Tracing(service.spans, service.clock))
        if policy not in AS_IT_IS:
            router.fleet.placer = Replayed(policy, router.fleet, setting)
        await run(router, service, listener)

    run_service("router", "live", common, serve, drain_s_max=settings.drain_s_max)


if __name__ == "__main__":
    main()
