"""Whatever the fleet looks like, a placement obeys the rules that keep answers right."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.kv_sources import SOURCES_MAX
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest, Rejection
from services.router.placement.placer import CostPlacer
from services.router.placement.request_fields import Forced, Mode
from services.router.state.cluster_view import ClusterView, exchanges_kv
from services.router.state.prefix_index import PrefixIndex
from shared.contracts.failures import Reason
from shared.contracts.kv_events import KvSnapshot, pack_hashes
from shared.contracts.workers import Role, WorkerPhase
from tests.support.fleet_builders import load, record

NOW = 100.0
POLICY = PlacementPolicy(silent_s_max=3.0, fetch_tokens_min=40, stream_tokens_min=64)


@st.composite
def fleets(draw):
    cluster, index = ClusterView(), PrefixIndex()
    for number in range(draw(st.integers(min_value=0, max_value=6))):
        worker_id = f"w{number}"
        made = record(
            worker_id,
            role=draw(st.sampled_from(list(Role))),
            models=draw(st.sampled_from([("m",), ("m", "x"), ("y",)])),
        )
        layout = draw(st.sampled_from(["NHD", "HND"]))
        made = msgspec.structs.replace(
            made,
            fingerprint=msgspec.structs.replace(
                made.fingerprint,
                revision=draw(st.sampled_from(["r1", "r1", "r2"])),
                kv_layout=layout,
                connector=draw(st.sampled_from(["baton-1", "baton-1", "none"])),
            ),
            legs_max=4,
        )
        cluster.record(made, NOW - draw(st.sampled_from([0.0, 1.0, 10.0])))
        if draw(st.booleans()):
            phase = draw(st.sampled_from([WorkerPhase.READY, WorkerPhase.READY, WorkerPhase.DRAINING]))
            numbers = {"legs": draw(st.integers(0, 5)), "waiting_tokens": draw(st.integers(0, 100_000))}
            cluster.report(
                load(worker_id, phase=phase, role=made.role, **numbers), NOW - draw(st.sampled_from([0.0, 5.0]))
            )
        index.join(worker_id, 1)
        held = draw(st.integers(0, 4))
        index.restore(KvSnapshot(worker_id=worker_id, epoch=1, seq=1, hashes=pack_hashes(range(1, held + 1))))
    return cluster, index


@st.composite
def needs(draw):
    return PlacementRequest(
        model=draw(st.sampled_from(["m", "m", "x", "unknown", ""])),
        mode=draw(st.sampled_from(list(Mode))),
        whole=draw(st.sampled_from(["", "", "because"])),
        prompt_tokens=draw(st.integers(1, 200)),
        hashes=(1, 2, 3, 4)[: draw(st.integers(0, 4))],
        fetch_tokens_min=draw(st.sampled_from([None, None, 0, 1000])),
        excluded=frozenset(draw(st.sets(st.sampled_from(["w0", "w1"])))),
        forced=draw(st.one_of(st.none(), st.none(), forcings)),
        revisions=draw(st.sampled_from([(), (), ("r1", ""), ("r2", "r1", ""), ("r3", "")])),
    )


workers = st.sampled_from(["", "w2", "w3", "w4"])
forcings = st.builds(Forced, prefill_worker=workers, decode_worker=workers, sources=st.sampled_from([None, ("w5",)]))


@given(fleets(), needs())
def test_every_placement_keeps_the_rules(fleet, need):
    cluster, index = fleet
    placed = CostPlacer(cluster, index, POLICY).place(need, NOW)
    if isinstance(placed, Rejection):
        known = not need.model or need.model in cluster.models_known
        assert (placed.reason is Reason.MODEL_UNKNOWN) == (not known)
        assert not known or placed.retry_after_s
        return
    chosen = [placed.decode] + ([placed.prefill] if placed.prefill else [])
    for view in chosen:
        assert view.fit(NOW, POLICY.silent_s_max)
        assert view.legs < view.record.legs_max
        assert not need.model or need.model in view.record.models
        assert view.record.worker_id not in need.excluded
    assert (placed.prefill is not None) == (placed.mode is Mode.DISAGGREGATED)
    if placed.prefill is not None:
        assert not need.whole
        assert need.mode is not Mode.AGGREGATED
        assert placed.prefill is not placed.decode
        assert placed.prefill.pairs_with == placed.decode.pairs_with
        assert placed.prefill.record.role is not Role.DECODE
        assert placed.decode.record.role is not Role.PREFILL
    else:
        assert need.whole or need.mode is not Mode.DISAGGREGATED
    assert 0 <= placed.cached_tokens < max(1, need.prompt_tokens)
    assert placed.cached_tokens + placed.fetched_tokens + placed.uncached_tokens == need.prompt_tokens
    assert placed.uncached_tokens > 0
    keep_the_rules_of_sources(placed, need, cluster, index)
    keep_the_rules_of_revisions(placed, need, cluster)


def keep_the_rules_of_revisions(placed, need, cluster):
    """KV never crosses from one to another, and who is wanted serves, as long as it can."""
    parts = [placed.prefill or placed.decode, placed.decode]
    parts += [cluster.workers[source.worker_id] for source in (*placed.sources, *placed.handoff)]
    served_by = {view.record.fingerprint.revision for view in parts}
    assert len(served_by) == 1
    if need.mode is not Mode.DISAGGREGATED and need.forced is None:
        assert placed.decode in wanted(cluster, need)


def wanted(cluster, need):
    """Who may serve it, full or not."""
    fit = [
        view
        for view in cluster.offering(need.model)
        if view.fit(NOW, POLICY.silent_s_max) and view.record.worker_id not in need.excluded
    ]
    for revision in need.revisions:
        of_this = [view for view in fit if revision in ("", view.record.fingerprint.revision)]
        if of_this:
            return of_this
    return fit


def keep_the_rules_of_sources(placed, need, cluster, index):
    computing = placed.prefill or placed.decode
    own = placed.cached_tokens // computing.record.hashing.block_size
    matches = index.match(need.hashes)
    assert len(placed.sources) <= 2 * SOURCES_MAX
    assert bool(placed.sources) == bool(placed.fetched_tokens)
    assert not (placed.sources and need.whole)
    for source in placed.sources:
        holder = cluster.workers[source.worker_id]
        assert holder is not computing
        assert holder.pairs_with == computing.pairs_with
        assert holder.fit(NOW, POLICY.silent_s_max)
        assert exchanges_kv(holder.record)
        assert (source.epoch, source.follow, source.first) == (holder.record.epoch, False, own)
        assert own < source.end <= matches[source.worker_id]
        assert source.end * computing.record.hashing.block_size < need.prompt_tokens
    if placed.sources:
        assert placed.sources[0].end == max(source.end for source in placed.sources)
    assert placed.streamed == any(source.follow for source in placed.handoff)
    assert bool(placed.handoff) == (placed.prefill is not None and exchanges_kv(placed.prefill.record))


@given(fleets(), needs())
def test_who_can_serve_it_does(fleet, need):
    cluster, index = fleet
    need = msgspec.structs.replace(need, forced=None)
    able = [view for view in wanted(cluster, need) if view.legs < view.record.legs_max]
    placed = CostPlacer(cluster, index, POLICY).place(need, NOW)
    if need.mode is not Mode.DISAGGREGATED or need.whole:
        assert isinstance(placed, Placement) == bool(able)


@given(fleets())
def test_two_workers_that_may_pair_do_so_when_asked_to(fleet):
    cluster, index = fleet
    able = [
        view
        for view in cluster.offering("m")
        if view.fit(NOW, POLICY.silent_s_max) and view.legs < view.record.legs_max
    ]
    possible = any(
        prefill is not decode
        and prefill.pairs_with == decode.pairs_with
        and prefill.record.role is not Role.DECODE
        and decode.record.role is not Role.PREFILL
        for prefill in able
        for decode in able
    )
    need = PlacementRequest(model="m", mode=Mode.DISAGGREGATED, prompt_tokens=10)
    assert isinstance(CostPlacer(cluster, index, POLICY).place(need, NOW), Placement) == possible
