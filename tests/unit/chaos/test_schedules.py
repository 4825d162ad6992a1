"""Schedules and traces follow from their seeds, and leave one process of each kind alive."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engines.simulated.core.batch import RequestParams
from services.worker.engines.simulated.core.engine_core import EngineCore
from services.worker.engines.simulated.core.settings import SimulationSettings
from shared.contracts.engine_paths import COMPLETIONS, MESSAGES, RESPONSES
from tests.nightly.chaos.chaos import make_oracle
from tests.nightly.chaos.faults import MENU, STORE, WORKERS_ONLY, Cast, Part, Rhythm, schedule
from tests.nightly.chaos.oracle import ADAPTER, MODEL, OTHER_MODEL, Oracle
from tests.nightly.chaos.trace import BATCH_LINES, LARGE_BYTES, Shape, make_batches, make_trace

ROLES = {"p1": "prefill", "p2": "prefill", "p3": "prefill", "d1": "decode", "d2": "decode", "s1": STORE}
CAST = Cast(
    names={
        Part.WORKER: tuple(ROLES),
        Part.ROUTER: ("r1", "r2"),
        Part.ORCHESTRATOR: ("o1", "o2"),
        Part.COLLECTOR: ("collector",),
        Part.NATS: ("nats",),
        Part.NODE: ("n1", "n2", "n3"),
        Part.KEY: ("key",),
    },
    roles=ROLES,
    proxied=frozenset({"p1", "r1"}),
)
PATHS = (COMPLETIONS, MESSAGES, RESPONSES)
SHAPE = Shape(seed=3, seconds=20.0, requests_per_s=5.0)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return make_oracle()


@given(seed=st.integers(0, 10_000), menu=st.sampled_from([MENU, WORKERS_ONLY]))
def test_one_process_of_each_kind_survives_and_faults_end_in_time(seed, menu):
    rhythm = Rhythm(seconds=60.0, every_s=1.0)
    faults = schedule(seed, CAST, rhythm, menu)

    assert faults == schedule(seed, CAST, rhythm, menu)
    assert all(fault.over_s <= rhythm.seconds - rhythm.calm_after_s for fault in faults)
    for fault in faults:
        hit = {other.target for other in faults if other.at_s <= fault.at_s < other.over_s + rhythm.recovers_s}
        assert {ROLES[name] for name in ROLES.keys() - hit} >= {"prefill", "decode"}
        assert {"r1", "r2"} - hit
        assert {"o1", "o2"} - hit
        assert len({"nats", "n1", "n2", "n3"} & hit) <= 1


def test_a_long_schedule_has_every_kind_of_fault():
    faults = schedule(1, CAST, Rhythm(seconds=300.0, every_s=1.0))

    assert {(fault.kind, fault.part) for fault in faults} == {(row.kind, row.part) for row in MENU}


@pytest.mark.slow
def test_a_trace_follows_its_shape_and_turns_include_the_history(oracle):
    asks = make_trace(SHAPE, oracle)

    assert asks == make_trace(SHAPE, oracle)
    assert 0.5 * 100 < len(asks) < 2 * 100
    assert [ask.number for ask in asks] == list(range(len(asks)))
    turns = 0
    for before, after in itertools.pairwise(sorted(asks, key=lambda ask: (ask.conversation, ask.at_s))):
        if before.conversation != after.conversation:
            continue
        turns += 1
        assert after.prompt[: len(before.prompt)] == before.prompt
        if before.path == COMPLETIONS:
            assert len(after.prompt) > len(before.prompt) + before.max_tokens
        else:
            assert after.prompt[len(before.prompt)] == ("assistant", before.answer)
    assert turns > len(asks) / 4


def test_a_trace_has_every_kind_of_client(oracle):
    asks = make_trace(SHAPE, oracle)
    large = [ask for ask in asks if isinstance(ask.prompt, str)]

    assert {ask.path for ask in asks} == {COMPLETIONS, MESSAGES, RESPONSES}
    assert {(ask.path, ask.stream) for ask in asks} == set(itertools.product(PATHS, (True, False)))
    assert all(LARGE_BYTES[0] <= len(ask.prompt) <= LARGE_BYTES[1] + 16 for ask in large)
    assert {ask.leaves_after_s is None for ask in large} == {True, False}
    assert {ask.keeps for ask in asks if ask.leaves_after_s is not None} == {True, False}
    for conversation in {ask.conversation for ask in asks}:
        assert len({(ask.keeps, ask.path) for ask in asks if ask.conversation == conversation}) == 1


def test_batches_follow_their_shape(oracle):
    shape = replace(SHAPE, batch_every_s=5.0)
    batches = make_batches(shape, oracle)

    assert make_batches(SHAPE, oracle) == []
    assert batches == make_batches(shape, oracle)
    assert len(batches) > 1
    for batch in batches:
        assert [line.number for line in batch.lines] == list(range(BATCH_LINES))


def test_a_fleet_s_second_model_and_adapter_are_asked(oracle):
    asks = make_trace(replace(SHAPE, other_cards=2, adapter_cards=2), oracle)

    assert {ask.model for ask in asks} == {MODEL, OTHER_MODEL, ADAPTER}
    adapted = next(ask for ask in asks if ask.model == ADAPTER)
    assert adapted.answer != oracle.text(oracle.answer(adapted.prompt, adapted.max_tokens))


@pytest.mark.parametrize("prompt_tokens", [1, 31, 32, 33, 64, 200])
def test_the_oracle_equals_an_engine(oracle, prompt_tokens):
    prompt = [10 + n % 900 for n in range(prompt_tokens)]
    core = EngineCore(SimulationSettings(), oracle.model)
    core.add(None, list(prompt), RequestParams(max_tokens=70, ignore_eos=True), 0.0)
    said, now = [], 0.0
    while (wakes_at := core.wakes_at()) is not None or not said:
        now = wakes_at or now
        said += [token for _, token in core.advance(now)]

    assert oracle.answer(prompt, 70) == said
