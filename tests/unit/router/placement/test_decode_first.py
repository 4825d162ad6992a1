"""In decode-first mode a decode worker with most of the prompt cached serves alone, and may refuse."""

from __future__ import annotations

import msgspec
import pytest

from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.placer import Placer
from services.router.request.facts import Mode
from shared.bus.frame_sender import LegFrames
from shared.contracts.inference import LegKind, LegReport, StartLeg
from tests.unit.router.fake_worker import JSON, SSE, FakeWorker, serve_leg, wants_stream
from tests.unit.router.world import World, in_world, long_prompt


def who_has_nothing(_worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
    """Refuse every leg that has a cache threshold."""
    if start.cache_hit_threshold:
        frames.head(200, SSE if wants_stream(start) else JSON)
        frames.data(b'data: {"choices":[{"text":"","finish_reason":"cache_threshold"}]}\n\n')
        frames.end(LegReport(prompt_tokens=9, finish_reason="cache_threshold"))
    else:
        serve_leg(_worker, start, frames)


@pytest.mark.parametrize("stream", [True, False])
@in_world()
async def test_after_a_decode_first_refusal_a_prefill_worker_computes_the_prompt(world: World, stream):
    _p1, d1 = await world.pair(decode=who_has_nothing, connector="baton-1")
    placer = world.router.fleet.placer
    world.router.fleet.placer = AsIfCached(placer)

    response = await world.ask(long_prompt(stream=stream))

    assert (response.status, response.headers["x-baton-mode"]) == (200, "disaggregated")
    assert b"cache_threshold" not in response.body
    assert [(leg.kind, leg.cache_hit_threshold) for leg in d1.started] == [
        (LegKind.AGGREGATED, 0.6),
        (LegKind.DECODE, 0.0),
    ]


class AsIfCached:
    """Place decode-first whenever the request allows it."""

    def __init__(self, placer: Placer) -> None:
        self.placer = placer

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        placement = self.placer.place(request, now)
        if isinstance(placement, Rejection) or not request.may_decode_first:
            return placement
        share = 0.6 if request.cache_hit_threshold is None else request.cache_hit_threshold
        return msgspec.structs.replace(
            placement, mode=Mode.DECODE_FIRST, prefill=None, handoff=(), streamed=False, hit_share_min=share
        )
