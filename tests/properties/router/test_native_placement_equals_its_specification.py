"""Placement in C decides, explains and rejects as its specification in Python does; numbers differ by rounding at most."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.router.placement.native import IS_COMPILED
from services.router.placement.placement import Placement, PlacementPolicy
from services.router.placement.placer import CostPlacer
from services.router.placement.slo import NO_TARGETS, Targets
from services.router.request.facts import ForcedWorkers, Mode
from services.router.state import fleet_table as t
from services.router.state.worker_view import Sent
from shared.contracts.workers import Role
from tests.properties.router.test_placements_keep_their_rules import MEMBERS, NOW, PROMPT, REQUESTS, Member, build
from tests.support.examples import SEEDS, examples, seeded

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="not built here")

COUNTED = (t.LEGS, t.LEGS_MAX, t.LAST_CHOSEN, t.HEARD_AT, t.DROPPED_TOKENS, t.BLOCK_SIZE, t.STEP_TOKENS)
"""Never anything but numbers, and the last two never zero."""
MEASURED = [number for number in range(t.NUMBERS) if number not in COUNTED]
NUMBERS = st.one_of(
    st.floats(0.0, 1.0),
    st.sampled_from([0.0, -0.0, 1e-9, 1e-3, 20.0, 4096.0, 1e300, 5e-324, math.inf, -math.inf, math.nan]),
)
WRITES = st.lists(st.tuples(st.integers(0, 19), st.sampled_from(MEASURED), NUMBERS), max_size=30)
PRECISION = 1e-9
SIZES = st.lists(
    st.tuples(
        st.integers(0, 19),
        st.sampled_from([t.BLOCK_SIZE, t.STEP_TOKENS, t.DROPPED_TOKENS, t.LEGS, t.LAST_CHOSEN]),
        st.sampled_from([1.0, 2.0, 16.0, 1e15]),
    ),
    max_size=4,
)
TARGETS = st.builds(
    Targets, ttft_s=st.sampled_from([0.01, 1.0, math.inf]), itl_s=st.sampled_from([0.0, 0.02, math.inf])
)
ASKED = st.builds(
    lambda request, tokens, out, threshold, may, targets: msgspec.structs.replace(
        request,
        prompt_tokens=tokens,
        tokens_out=out,
        cache_hit_threshold=threshold,
        may_decode_first=may,
        targets=targets,
    ),
    REQUESTS,
    st.integers(0, 200) | st.sampled_from([0, 128, 2**40]),
    st.sampled_from([0, 1, 500, 10**9]),
    st.none() | st.floats(0.0, 1.0),
    st.booleans(),
    st.just(NO_TARGETS) | TARGETS,
)
POLICIES = st.builds(
    PlacementPolicy,
    tie_s=st.sampled_from([0.0, 0.002, math.inf]),
    stream_tokens_min=st.sampled_from([-1, 0, 64]),
    stream_s_max=st.sampled_from([0.001, 20.0]),
    weighed_max=st.sampled_from([12, 2]),
    fetch_tokens_min=st.sampled_from([0, 40, 2**70]),
    decode_first_share_min=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    decode_first_found_min=st.sampled_from([0.0, 0.8, 1.0]),
)


def plain(value):
    """Everything that a result says, as plain values."""
    if not isinstance(value, Placement):
        return msgspec.to_builtins(value)
    said = {name: getattr(value, name) for name in value.__struct_fields__}
    said |= {
        "predicted": msgspec.to_builtins(value.predicted),
        "sources": list(map(msgspec.to_builtins, value.sources)),
    }
    said |= {"decode": value.decode.record.worker_id, "prefill": value.prefill and value.prefill.record.worker_id}
    said["candidates"] = [
        [part, [candidate_of(one) for one in among], chosen and candidate_of(chosen)]
        for part, among, chosen in value.candidates
    ]
    return said


def candidate_of(one):
    return [one.view.record.worker_id, *one.estimate]


def differences(one, other, path=""):
    """Where two results differ by more than rounding."""
    if isinstance(one, float) and isinstance(other, float):
        is_same = math.isclose(one, other, rel_tol=PRECISION, abs_tol=1e-15) or (math.isnan(one) and math.isnan(other))
        return [] if is_same else [(path, one, other)]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [each for key in one for each in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for at, (left, right) in pairs for each in differences(left, right, f"{path}[{at}]")]
    return [] if type(one) is type(other) and one == other else [(path, one, other)]


def set_block_size(cluster, tokens):
    """Of all workers: those that exchange KV have the same. The table's number is a copy of the record's."""
    for view in cluster.workers.values():
        hashing = msgspec.structs.replace(view.record.hashing, block_size=int(tokens))
        view.renew(msgspec.structs.replace(view.record, hashing=hashing))
        cluster.table.numbers[t.BLOCK_SIZE, view.row] = tokens


def set_step_tokens(cluster, row, tokens):
    """Of one worker: this number is a copy of the record's, too."""
    view = cluster.views[row] if row < cluster.table.count else None
    if view is not None:
        view.renew(msgspec.structs.replace(view.record, step_tokens_max=int(tokens)))
    cluster.table.numbers[t.STEP_TOKENS, row] = tokens


def outcomes(members, writes, requests, policy, *, compiled):
    cluster, index = build(members)
    for row, number, value in writes:
        if number == t.BLOCK_SIZE:
            set_block_size(cluster, value)
        elif number == t.STEP_TOKENS:
            set_step_tokens(cluster, row % len(cluster.table.groups), value)
        else:
            cluster.table.numbers[number, row % len(cluster.table.groups)] = value
    placer = CostPlacer(cluster, index, policy, compiled=compiled)
    with np.errstate(all="ignore"):
        for request in requests:
            result = placer.place(request, NOW)
            yield plain(result)
            if isinstance(result, Placement):
                row = result.decode.row
                free = cluster.table.numbers[t.FREE_TOKENS, row]
                cluster.leg_started(result.decode.record.worker_id, Sent(NOW, 7, 9))
                cluster.table.numbers[t.FREE_TOKENS, row] = free  # As written: those of the next requests are shared.
                result.decode.own.prompts.add(request.hashes)
    yield cluster.table.numbers.tobytes()


@settings(max_examples=examples(150))
@given(
    st.lists(MEMBERS, max_size=6) | st.lists(MEMBERS, min_size=13, max_size=20),
    st.tuples(WRITES, SIZES),
    st.lists(ASKED, min_size=1, max_size=3),
    POLICIES,
)
@example([Member()] * 2, ([(0, t.DECODE_STEP_S, math.nan)], []), [PROMPT], PlacementPolicy())
@example([Member()] * 2, ([(row, t.DECODE_STEP_S, math.nan) for row in range(2)], []), [PROMPT], PlacementPolicy())
@example([Member()] * 13, ([(row, t.HEARD_AT, 1e9) for row in range(13)], []), [PROMPT], PlacementPolicy())
@example([Member(), Member(held=4), Member(held=3)], ([], []), [PROMPT], PlacementPolicy(fetch_tokens_min=1))
@example([Member()] * 3 + [Member(held=1)], ([], [(0, t.BLOCK_SIZE, 1.0)]), [PROMPT], PlacementPolicy())
@example([Member(held=4)] * 2, ([], [(0, t.DROPPED_TOKENS, 16.0)]), [PROMPT], PlacementPolicy(fetch_tokens_min=1))
@example(
    [Member(role=Role.PREFILL, held=1), Member(role=Role.DECODE)],
    ([], [(1, t.STEP_TOKENS, 1.0)]),
    [msgspec.structs.replace(PROMPT, mode=Mode.AUTO, prompt_tokens=34, hashes=(1,), may_decode_first=True)],
    PlacementPolicy(fetch_tokens_min=0),
)
@example([Member(held=1), Member(held=4)], ([(0, t.PREFILL_TOKEN_S, 1.0)], []), [PROMPT] * 3, PlacementPolicy())
@example([Member(held=4)] * 2, ([(row, t.FREE_TOKENS, 300.0) for row in range(2)], []), [PROMPT] * 3, PlacementPolicy())
def test_both_say_the_same(members, writes, requests, policy):
    written = [*writes[0], *writes[1]]
    native = list(outcomes(members, written, requests, policy, compiled=True))
    specified = list(outcomes(members, written, requests, policy, compiled=False))

    assert not differences(native, specified)


@seeded(150)
@given(SEEDS)
def test_both_say_the_same_of_large_fleets(seed):
    """Each worker has numbers of its own, so that few are among the cheapest, and many are passed over."""
    chance = random.Random(seed)

    def some_fleet():
        kinds = [
            Member(chance.choice(list(Role)), kv_layout=chance.choice(["NHD", "NHD", "HND"]), held=chance.randint(0, 4))
            for _ in range(chance.randint(1, 8))
        ]
        fleet = [chance.choice(kinds) for _ in range(chance.choice([14, 16, 17, 32, 33, 64, 65, 100, 150]))]
        return fleet if chance.random() < 0.5 else sorted(fleet, key=kinds.index)  # Alike workers side by side.

    def some_number():
        usual = chance.choice([1e-3, 1.0, 5000.0]) * chance.random()
        return usual if chance.random() < 0.99 else chance.choice([math.nan, math.inf, -math.inf, 0.0])

    def some_worker():
        return f"w{chance.randrange(len(members) + 2)}"

    def some_forced():
        sources = chance.choice([None, (), (some_worker(), some_worker())])
        prefill, decode = (chance.choice(["", some_worker()]) for _ in range(2))
        return ForcedWorkers(prefill_worker=prefill, decode_worker=decode, sources=sources)

    def some_request():
        targets = Targets(ttft_s=chance.choice([0.01, 1.0, math.inf]), itl_s=chance.choice([0.01, 1.0, math.inf]))
        tokens, out, mode = chance.randint(0, 200), chance.randint(0, 500), chance.choice(list(Mode))
        return msgspec.structs.replace(
            PROMPT,
            prompt_tokens=tokens,
            tokens_out=out,
            mode=mode,
            targets=targets,
            unsplittable=chance.choice(["", "", "", "because"]),
            cache_hit_threshold=chance.choice([None, None, 0.5]),
            may_decode_first=chance.random() < 0.7,
            excluded=frozenset(some_worker() for _ in range(chance.choice([0, 0, 1, 10]))),
            forced=some_forced() if chance.random() < 0.4 else None,
        )

    members = some_fleet()
    requests = [some_request() for _ in range(3)]
    writes = [(row, number, some_number()) for row in range(len(members)) for number in MEASURED]
    policy = PlacementPolicy(weighed_max=chance.choice([2, 12]), fetch_tokens_min=chance.choice([0, 16, 40]))

    native = list(outcomes(members, writes, requests, policy, compiled=True))
    specified = list(outcomes(members, writes, requests, policy, compiled=False))

    assert not differences(native, specified)
