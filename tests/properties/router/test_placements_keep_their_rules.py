"""In any fleet, a placement keeps the rules without which a response could be wrong or a request could hang."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest, Rejection
from services.router.placement.placer import CostPlacer
from services.router.placement.specification import SOURCES_MAX
from services.router.request.facts import ForcedWorkers, Mode
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.worker_view import can_exchange_kv
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_events import KvSnapshot, pack_hashes
from shared.contracts.workers import Role, WorkerPhase
from tests.support.fleet_builders import load, record

NOW = 100.0
POLICY = PlacementPolicy(silent_s_max=3.0, fetch_tokens_min=40, stream_tokens_min=64)


class Report(NamedTuple):
    phase: WorkerPhase = WorkerPhase.READY
    legs: int = 0
    waiting_tokens: int = 0
    age_s: float = 0.0


class Member(NamedTuple):
    """One worker; plain values, so that a failing fleet is printed in full and can become an explicit example."""

    role: Role = Role.BOTH
    models: tuple[str, ...] = ("m",)
    revision: str = "r1"
    kv_layout: str = "NHD"
    connector: str = "baton-1"
    age_s: float = 0.0
    report: Report | None = None
    held: int = 0
    """Blocks of the prompt."""


REPORTS = st.builds(
    Report,
    phase=st.sampled_from([WorkerPhase.READY, WorkerPhase.READY, WorkerPhase.DRAINING]),
    legs=st.integers(0, 5),
    waiting_tokens=st.integers(0, 100_000),
    age_s=st.sampled_from([0.0, 5.0]),
)
MEMBERS = st.builds(
    Member,
    role=st.sampled_from(list(Role)),
    models=st.sampled_from([("m",), ("m", "x"), ("y",)]),
    revision=st.sampled_from(["r1", "r1", "r2"]),
    kv_layout=st.sampled_from(["NHD", "HND"]),
    connector=st.sampled_from(["baton-1", "baton-1", "none"]),
    age_s=st.sampled_from([0.0, 1.0, 10.0]),
    report=st.none() | REPORTS,
    held=st.integers(0, 4),
)
FLEETS = st.lists(MEMBERS, max_size=6)
WORKERS = st.sampled_from([WorkerId(f"w{number}") for number in range(6)])
REQUESTS = st.builds(
    PlacementRequest,
    model=st.sampled_from(["m", "m", "x", "unknown", ""]),
    mode=st.sampled_from(list(Mode)),
    unsplittable=st.sampled_from(["", "", "because"]),
    prompt_tokens=st.integers(1, 200),
    hashes=st.sampled_from([(1, 2, 3, 4)[:count] for count in range(5)]),
    fetch_tokens_min=st.sampled_from([None, None, 0, 1000]),
    excluded=st.frozensets(st.sampled_from(["w0", "w1"])),
    forced=st.none()
    | st.none()
    | st.builds(
        ForcedWorkers,
        prefill_worker=st.just("") | WORKERS,
        decode_worker=st.just("") | WORKERS,
        sources=st.none() | st.lists(WORKERS, max_size=2, unique=True).map(tuple),
    ),
    revisions=st.sampled_from([(), (), ("r1", ""), ("r2", "r1", ""), ("r3", "")]),
)

PROMPT = PlacementRequest(model="m", prompt_tokens=129, hashes=(1, 2, 3, 4))


def build(members: list[Member]) -> tuple[ClusterView, PrefixIndex]:
    cluster, index = ClusterView(), PrefixIndex()
    for number, member in enumerate(members):
        worker_id = WorkerId(f"w{number}")
        made = record(
            worker_id, role=member.role, models=member.models, connector=member.connector, revision=member.revision
        )
        fingerprint = msgspec.structs.replace(made.fingerprint, kv_layout=member.kv_layout)
        cluster.record(msgspec.structs.replace(made, fingerprint=fingerprint, legs_max=4), NOW - member.age_s)
        if (report := member.report) is not None:
            numbers = {"legs": report.legs, "waiting_tokens": report.waiting_tokens}
            cluster.report(load(worker_id, phase=report.phase, role=member.role, **numbers), NOW - report.age_s)
        index.join(worker_id, 1)
        held = pack_hashes(range(1, member.held + 1))
        index.restore(KvSnapshot(worker_id=worker_id, epoch=1, seq=1, hashes=held))
    return cluster, index


@given(FLEETS, REQUESTS)
@example([Member(), Member(role=Role.STORE, held=4)], PROMPT)
@example([Member(), Member(held=4, age_s=10.0)], msgspec.structs.replace(PROMPT, forced=ForcedWorkers(sources=("w1",))))
@example(
    [Member(), Member(held=4)],
    msgspec.structs.replace(PROMPT, unsplittable="echo", forced=ForcedWorkers(decode_worker="w0", sources=("w1",))),
)
@example(
    [Member(), Member(held=4)],
    msgspec.structs.replace(PROMPT, excluded=frozenset({"w1"}), forced=ForcedWorkers(sources=("w1",))),
)
def test_every_placement_keeps_the_rules(members, request):
    cluster, index = build(members)
    result = CostPlacer(cluster, index, POLICY).place(request, NOW)
    if isinstance(result, Rejection):
        # A registry without workers may have been lost.
        known = not request.model or not cluster.workers or request.model in cluster.models_known
        assert (result.reason is Reason.MODEL_UNKNOWN) == (not known)
        assert not known or result.retry_after_s
        return
    chosen = [result.decode] + ([result.prefill] if result.prefill else [])
    for view in chosen:
        assert view.fit(NOW, POLICY.silent_s_max)
        assert view.legs < view.record.legs_max
        assert not request.model or request.model in view.record.models
        assert view.record.worker_id not in request.excluded
    assert (result.prefill is not None) == (result.mode is Mode.DISAGGREGATED)
    if result.prefill is not None:
        assert not request.unsplittable
        assert request.mode is not Mode.AGGREGATED
        assert result.prefill is not result.decode
        assert result.prefill.pairs_with == result.decode.pairs_with
        assert result.prefill.record.role is not Role.DECODE
        assert result.decode.record.role is not Role.PREFILL
        assert may_receive(result.decode, request, index)
    else:
        forced_apart = request.mode is Mode.DISAGGREGATED or bool(request.forced and request.forced.prefill_worker)
        kept = request.unsplittable or request.mode is Mode.AGGREGATED or not may_receive(result.decode, request, index)
        assert kept or not forced_apart
    assert 0 <= result.cached_tokens < max(1, request.prompt_tokens)
    assert result.cached_tokens + result.fetched_tokens + result.uncached_tokens == request.prompt_tokens
    assert result.uncached_tokens > 0
    check_sources(result, request, cluster, index)
    check_revisions(result, request, cluster)


def may_receive(view, request, index):
    """Whether another worker could hand over a block of KV to it: one that it does not have, unless a refusal has shown
    that the index is wrong. Connectors of others move partial blocks too.
    """
    size = view.record.hashing.block_size
    held = min(index.match(request.hashes).get(view.record.worker_id, 0), max(0, request.prompt_tokens - 1) // size)
    lacking = request.prompt_tokens - (held * size if request.may_decode_first else 0)
    return lacking >= size or not can_exchange_kv(view.record)


def check_revisions(placement, request, cluster):
    """KV never crosses from one revision to another, and the preferred revision serves if it can."""
    views = [placement.prefill or placement.decode, placement.decode]
    views += [cluster.workers[source.worker_id] for source in (*placement.sources, *placement.handoff)]
    assert len({view.record.fingerprint.revision for view in views}) == 1
    if request.mode is not Mode.DISAGGREGATED and request.forced is None:
        assert placement.decode in could_serve(cluster, request)


def could_serve(cluster, request):
    """Workers that could serve the request, full or not."""
    fit = [
        view
        for view in cluster.offering(request.model)
        if view.fit(NOW, POLICY.silent_s_max) and view.record.worker_id not in request.excluded
    ]
    for revision in request.revisions:
        of_this = [view for view in fit if revision in ("", view.record.fingerprint.revision)]
        if of_this:
            return of_this
    return fit


def check_sources(placement, request, cluster, index):
    computing = placement.prefill or placement.decode
    assert not (placement.sources and request.unsplittable)
    for source in placement.sources:
        holder = cluster.workers[source.worker_id]
        assert holder is not computing
        assert holder.pairs_with == computing.pairs_with
        # A store serves no legs, so that ``fit`` is False for it, but it may be a source.
        assert holder.ready
        assert holder.heard_at >= NOW - POLICY.silent_s_max
        assert source.worker_id not in request.excluded
        assert can_exchange_kv(holder.record)
        assert (source.epoch, source.follow) == (holder.record.epoch, False)
    assert placement.streamed == any(source.follow for source in placement.handoff)
    assert bool(placement.handoff) == (placement.prefill is not None and can_exchange_kv(placement.prefill.record))
    if request.forced is not None and request.forced.sources is not None:
        assert {source.worker_id for source in placement.sources} <= set(request.forced.sources)
    else:
        check_chosen_sources(placement, request, index)


def check_chosen_sources(placement, request, index):
    """Sources that the client did not name hold what they are asked for."""
    block_size = (placement.prefill or placement.decode).record.hashing.block_size
    own, matches = placement.cached_tokens // block_size, index.match(request.hashes)
    assert len(placement.sources) <= 2 * SOURCES_MAX
    assert bool(placement.sources) == bool(placement.fetched_tokens)
    for source in placement.sources:
        assert source.first == own
        assert own < source.end <= matches[source.worker_id]
        assert source.end * block_size < request.prompt_tokens
    if placement.sources:
        assert placement.sources[0].end == max(source.end for source in placement.sources)


@given(FLEETS, REQUESTS)
def test_a_request_is_served_if_a_worker_can(members, request):
    cluster, index = build(members)
    request = msgspec.structs.replace(request, forced=None)
    able = [view for view in could_serve(cluster, request) if view.legs < view.record.legs_max]
    result = CostPlacer(cluster, index, POLICY).place(request, NOW)
    if request.mode is not Mode.DISAGGREGATED or request.unsplittable:
        assert isinstance(result, Placement) == bool(able)


@given(FLEETS, st.booleans())
def test_a_pair_is_placed_on_request_if_it_has_kv_to_hand_over(members, long):
    """Without a whole block to hand over, a worker that answers serves the request alone."""
    cluster, index = build(members)
    able = [
        view
        for view in cluster.offering("m")
        if view.fit(NOW, POLICY.silent_s_max) and view.legs < view.record.legs_max
    ]
    pairs = [
        (prefill, decode)
        for prefill in able
        for decode in able
        if prefill is not decode
        and prefill.pairs_with == decode.pairs_with
        and prefill.record.role is not Role.DECODE
        and decode.record.role is not Role.PREFILL
    ]
    request = PlacementRequest(model="m", mode=Mode.DISAGGREGATED, prompt_tokens=40 if long else 10)
    receiving = [pair for pair in pairs if may_receive(pair[1], request, index)]
    alone = [one for one in able if one.record.role is not Role.PREFILL and not may_receive(one, request, index)]

    result = CostPlacer(cluster, index, POLICY).place(request, NOW)

    assert isinstance(result, Placement) == bool(receiving or alone)
    if not isinstance(result, Placement):
        return
    if result.prefill is not None:
        assert (result.prefill, result.decode) in receiving
    else:
        assert result.decode in alone
        assert result.mode is Mode.AGGREGATED
        partners = [prefill for prefill, decode in pairs if decode is result.decode]
        assert ("hand over" in result.why) == bool(partners)
