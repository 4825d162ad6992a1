"""The simulated engine keeps its limits, and its tokens depend on its KV."""

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from services.worker.engines.simulated.core.batch import RequestParams, Sequence, SequenceStats
from services.worker.kv_events import HeldBlocks
from shared.contracts.kv_events import block_hash64, unpack_hashes
from tests.support.examples import examples
from tests.unit.worker.simulated.builders import (
    BLOCK,
    INSTANT,
    answer,
    completion,
    engine,
    finish_all,
    params,
    prompt,
    settings,
)

REQUESTS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=12)
"""Prompt length, seed (equal seeds share prefixes), tokens asked for."""


def keeps_its_limits(core):
    uses = Counter(block for one in core.batch.unfinished() for block in chain(one.blocks, one.states, *one.kept))
    uses += core.exchange.holder._leases._pins
    assert core.cache._holders == [uses[block] for block in range(core.cache.blocks)]
    assert len(core.batch.running) <= core.settings.max_num_seqs
    if core._step is not None:
        totals = core._step.totals
        assert 0 < totals.prefill_tokens + totals.decode_requests <= core.settings.max_num_batched_tokens
    for sequence in core.batch.unfinished():
        assert len(sequence.blocks) == len(set(sequence.blocks))
        assert sequence.computed <= len(sequence.blocks) * BLOCK


@given(requests=REQUESTS, blocks=st.integers(20, 60), budget=st.integers(1, 64), seqs=st.integers(1, 6))
@hypothesis_settings(max_examples=examples(80), deadline=None)
def test_every_request_finishes_within_limits_and_frees_its_blocks(requests, blocks, budget, seqs):
    core = engine(kv_blocks=blocks, max_num_batched_tokens=budget, max_num_seqs=seqs)
    sequences = [
        core.add(None, prompt(length, seed), params(tokens), now=0.0)
        for length, seed, tokens in requests
        if length + tokens <= core.settings.max_model_len
    ]
    finish_all(core, check=keeps_its_limits)

    assert core.cache.free == blocks
    for sequence in sequences:
        assert len(completion(sequence)) == sequence.params.max_tokens
        assert sequence.finish_reason == "length"


@given(requests=REQUESTS, blocks=st.integers(20, 40), budget=st.integers(3, 40))
@hypothesis_settings(max_examples=examples(60), deadline=None)
def test_tokens_do_not_depend_on_preemption_or_eviction(requests, blocks, budget):
    crowded = engine(kv_blocks=blocks, max_num_batched_tokens=budget)
    sequences = [
        crowded.add(None, prompt(n, seed), params(t), now=0.0) for n, seed, t in requests if n + t <= blocks * 4
    ]
    finish_all(crowded)

    for sequence in sequences:
        alone = answer(engine(), sequence.tokens[: sequence.prompt_tokens], sequence.params)
        assert completion(sequence) == completion(alone)


def test_a_block_recycled_under_a_running_sequence_changes_every_later_token():
    clean, spoiled = engine(), engine()
    kept = clean.add(None, prompt(30), params(20), now=0.0)
    hit = spoiled.add(None, prompt(30), params(20), now=0.0)
    for core in (clean, spoiled):
        core.advance(0.0)
        core.advance(core.wakes_at())
    spoiled.cache.contents[hit.blocks[2]] ^= 1
    finish_all(clean, now=1.0)
    finish_all(spoiled, now=1.0)

    before, after = completion(kept), completion(hit)
    assert before[:2] == after[:2]  # the second was being made
    assert all(one != other for one, other in zip(before[2:], after[2:], strict=True))


def test_the_last_prompt_token_is_always_computed():
    core = engine()
    answer(core, prompt(4 * BLOCK))

    again = answer(core, prompt(4 * BLOCK))

    assert again.stats.cached_tokens == 3 * BLOCK


def test_a_long_prompt_is_chunked_while_others_decode():
    core = engine(max_num_batched_tokens=8, **INSTANT)
    talking = core.add("talking", prompt(4), params(20), now=0.0)
    core.advance(0.0)
    core.advance(0.0)
    core.add("long", prompt(40, seed=2), params(1), now=0.0)

    order = []
    while core.wakes_at() is not None:
        order += [sequence.owner for sequence, _ in core.advance(0.0)]

    assert order.index("long") >= 5
    assert len(completion(talking)) == 20


def test_without_free_blocks_the_youngest_sequence_is_preempted():
    core = engine(kv_blocks=16, max_model_len=60)
    old = core.add(None, prompt(20, seed=1), params(30), now=0.0)
    young = core.add(None, prompt(20, seed=2), params(30), now=0.0)
    finish_all(core, check=keeps_its_limits)

    assert core.batch.preemptions > 0
    assert old.stats.first_token_at <= young.stats.first_token_at
    assert completion(young) == completion(answer(engine(), prompt(20, seed=2), params(30)))


@pytest.mark.parametrize("advances", [0, 1, 2, 5])
def test_an_aborted_sequence_frees_its_blocks_at_once(advances):
    core = engine()
    gone = core.add("gone", prompt(30), params(30), now=0.0)
    core.add("stays", prompt(30, seed=3), params(10), now=0.0)
    now = 0.0
    for _ in range(advances):
        core.advance(now)
        now = core.wakes_at()
    core.abort(gone)
    core.abort(gone)
    keeps_its_limits(core)

    owners = set()
    while core.wakes_at() is not None or not owners:
        owners |= {sequence.owner for sequence, _ in core.advance(now)}
        now = core.wakes_at() or now

    assert owners == {"stays"}
    assert core.cache.free == core.cache.blocks


def test_events_match_the_cache_through_evictions():
    core, told = engine(kv_blocks=12, max_model_len=40), HeldBlocks()
    for seed in range(6):
        answer(core, prompt(20, seed), params(10))
        told.apply(core.cache.take_events())

    assert set(unpack_hashes(told.packed())) == {block_hash64(full) for full in core.cache.hashes()}


def test_salts_keep_the_blocks_of_tenants_apart():
    core = engine()
    first = answer(core, prompt(20), params(cache_salt="a"))
    other = answer(core, prompt(20), params(cache_salt="b"))
    same = answer(core, prompt(20), params(cache_salt="a"))

    assert (other.stats.cached_tokens, same.stats.cached_tokens) == (0, 16)
    assert completion(first) == completion(other)


def test_eos_ends_an_answer_unless_ignored_or_too_early():
    core = engine(kv_blocks=1000)
    lengths = [len(completion(answer(core, prompt(10, seed), params(2000, ignore_eos=False)))) for seed in range(30)]
    patient = answer(core, prompt(10), params(2000, ignore_eos=False, min_tokens=1500))

    assert 100 < sum(lengths) / len(lengths) < 500
    assert patient.finish_reason == "stop"
    assert len(completion(patient)) >= 1500


def test_a_stop_token_ends_the_answer_with_it():
    said = completion(answer(engine(), prompt(10)))

    stopped = answer(engine(), prompt(10), params(stop_token_ids={said[3]}))

    assert completion(stopped) == said[: said.index(said[3]) + 1]
    assert stopped.finish_reason == "stop"


def test_steps_take_the_simulated_time():
    core = engine(
        max_num_batched_tokens=100,
        prefill_base_s=0.5,
        prefill_tokens_per_s=10.0,
        decode_base_s=0.25,
        decode_per_sequence_s=0.125,
    )
    first, second = (core.add(None, prompt(10, seed), params(3), now=0.0) for seed in (1, 2))

    ended = finish_all(core)

    assert first.stats.first_token_at == second.stats.first_token_at == pytest.approx(0.5 + 2.0)
    assert ended == pytest.approx(2.5 + 2 * (0.25 + 0.125))


def test_the_totals_of_its_steps_explain_how_long_they_took():
    core = engine(prefill_base_s=0.5, prefill_tokens_per_s=10.0, decode_base_s=0.25)
    for seed, length in enumerate((10, 40, 7)):
        core.add(None, prompt(length, seed), params(3 + seed), now=0.0)

    ended = finish_all(core)

    totals = core.measures.steps.totals()
    assert (totals.prefill_tokens, totals.decode_requests) == (10 + 40 + 7, 2 + 3 + 4)
    assert totals.prefill_pairs == (10**2 + 40**2 + 7**2) / 2
    assert totals.decode_context_tokens == (11 + 12) + (41 + 42 + 43) + (8 + 9 + 10 + 11)
    decode_s = totals.decode_steps * 0.25 + (totals.decode_requests - totals.decode_steps) * 0.0001
    assert totals.seconds == pytest.approx(ended)
    assert totals.seconds == pytest.approx(totals.prefill_steps * 0.5 + 57 / 10.0 + decode_s)


def test_tokens_wait_until_the_step_that_computes_them_has_ended():
    core = engine(max_num_batched_tokens=32, prefill_base_s=1.0)
    core.add(None, prompt(40), params(2), now=0.0)
    waiting = [core.waiting_tokens()]
    for _ in range(3):
        core.advance(core.wakes_at() or 0.0)
        waiting.append(core.waiting_tokens())

    assert waiting == [40, 40, 8, 0]


def test_a_slightly_late_caller_does_not_slow_the_engine_down():
    core = engine(decode_base_s=1.0)
    core.add(None, prompt(4), params(5), now=0.0)
    core.advance(0.0)
    planned = core.wakes_at()
    core.advance(planned + 0.01)

    assert core.wakes_at() == pytest.approx(planned + 1.0)


@pytest.mark.parametrize(("tokens", "count"), [([], 1), ([5] * 257, 1), ([5] * 250, 7), ([5], 0)])
def test_impossible_requests_are_refused_at_once(tokens, count):
    with pytest.raises(ValueError, match="do not fit"):
        engine().add(None, tokens, params(count), now=0.0)


def test_settings_that_cannot_work_are_refused_with_their_reason():
    with pytest.raises(ValueError, match="does not fit into 2 KV blocks"):
        settings(kv_blocks=2, max_model_len=9)
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1"):
        settings(max_num_seqs=0)


def test_expected_cache_hits_do_not_count_as_waiting_work():
    sequence = Sequence(
        request_id="1", owner=None, prompt_tokens=100, tokens=[1] * 100, params=RequestParams(max_tokens=1, expected_tokens=30),
        stats=SequenceStats(arrived_at=0.0),
    )  # fmt: skip
    waiting, sequence.computed = sequence.prompt_tokens_left, 90

    assert (waiting, sequence.prompt_tokens_left) == (30, 10)
