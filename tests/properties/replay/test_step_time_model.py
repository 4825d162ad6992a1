"""The fast engine against the simulated engine that workers run: the same times, the same blocks."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from zlib import crc32

from hypothesis import given, settings
from hypothesis import strategies as st

from replay.engine import Engine, Job
from replay.profile import PROFILES, Profile
from services.worker.engines.simulated.core.batch import RequestParams
from services.worker.engines.simulated.core.engine_core import EngineCore, ModelTokens
from services.worker.engines.simulated.core.settings import SimulationSettings, StepTiming, tokens_max
from tests.support.examples import examples

BLOCK = 4
OTHERS = {"full": 0, "window": 40, "state": 6}
"""Blocks that one sequence needs of the other groups."""
NAME = (1 << 63) - 1
VOCABULARY = ModelTokens(size=50_000, sayable=list(range(100, 200)))

profiles = st.builds(
    Profile,
    block_tokens=st.just(BLOCK),
    kv_blocks=st.integers(16, 40),
    max_num_batched_tokens=st.integers(9, 30),
    max_num_seqs=st.integers(1, 8),
    prefill_tokens_per_s=st.sampled_from([1000.0, 3000.0]),
    prefill_base_s=st.sampled_from([0.0, 0.002]),
    prefill_s_per_pair=st.sampled_from([0.0, 1e-6]),
    decode_base_s=st.sampled_from([0.004, 0.01]),
    decode_per_sequence_s=st.sampled_from([0.0, 0.0003]),
    decode_per_context_token_s=st.sampled_from([0.0, 0.00001]),
    step_model=st.sampled_from(["linear", "roofline", "table"]),
    speed=st.sampled_from([1.0, 0.6]),
    noise=st.sampled_from([0.0, 0.2]),
    groups=st.sampled_from(["full", "full", "window", "state"]),
    noise_seed=st.just(crc32(SimulationSettings().worker_id.encode())),
).map(lambda profile: replace(profile, kv_blocks=profile.kv_blocks + OTHERS[profile.groups]))
# Content, how much of it, how long the answer is, and the pause before it in milliseconds.
arrivals = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 20), st.floats(0.0, 60.0)), min_size=1, max_size=12
)


class Quiet:
    """Listens to nothing."""

    def asks(self, engine, job, now): ...
    def receives(self, engine, job, now): ...
    def computed(self, engine, job, now): ...
    def first_token(self, engine, job, now): ...
    def finished(self, engine, job, now): ...


def prompts_of(rows):
    """Prompts that share prefixes; the last token of each is its own, so that no two answers are alike."""
    at_s = 0.0
    for number, (content, tokens, out, pause_ms) in enumerate(rows):
        at_s += pause_ms / 1000
        prompt = [1000 * (content + 1) + index for index in range(tokens - 1)] + [10_000 + number]
        yield at_s, prompt, out


def run_core(profile, rows):
    core = EngineCore(
        SimulationSettings(
            block_size=BLOCK,
            groups=profile.groups,
            kv_blocks=profile.kv_blocks,
            max_model_len=tokens_max(profile.groups, profile.kv_blocks, BLOCK),
            max_num_batched_tokens=profile.max_num_batched_tokens,
            max_num_seqs=profile.max_num_seqs,
            **{each.name: getattr(profile, each.name) for each in fields(StepTiming)},
        ),
        VOCABULARY,
    )
    times: dict[int, list[float]] = {}
    due = list(enumerate(prompts_of(rows)))
    now = 0.0
    sequences = {}
    while True:
        wake = core.wakes_at()
        next_add = due[0][1][0] if due else math.inf
        if wake is None and not due:
            break
        now = min(wake if wake is not None else math.inf, next_add)
        if wake is not None and wake <= now:
            take(core, now, times)
        while due and due[0][1][0] <= now:
            number, (_at, prompt, out) = due.pop(0)
            sequences[number] = core.add(number, prompt, RequestParams(max_tokens=out, ignore_eos=True), now)
            take(core, now, times)
    return times, {n: (s.stats.cached_tokens, s.num_preemptions) for n, s in sequences.items()}, core


def take(core, now, times):
    for sequence, _token in core.advance(now):
        times.setdefault(sequence.owner, []).append(now)


def run_fast(profile, rows):
    engine = Engine(profile, Quiet())
    jobs = []
    for number, (at_s, prompt, out) in enumerate(prompts_of(rows)):
        while engine.wakes_at <= at_s:
            engine.wake(engine.wakes_at)
        full = [tuple(prompt[: BLOCK * (index + 1)]) for index in range(len(prompt) // BLOCK)]
        jobs.append(Job(number, tuple(hash(block) & NAME for block in full), len(prompt), out))
        engine.add(jobs[-1], at_s)
        assert engine.pool.free >= 0
    while engine.wakes_at < math.inf:
        engine.wake(engine.wakes_at)
    return jobs, engine


@settings(max_examples=examples(150), deadline=None)
@given(profiles, arrivals)
def test_every_prompt_begins_and_ends_as_in_the_simulated_engine(profile, rows):
    times, told, core = run_core(profile, rows)
    jobs, engine = run_fast(profile, rows)

    for number, job in enumerate(jobs):
        assert math.isclose(job.first_token_at, times[number][0], abs_tol=1e-9)
        assert math.isclose(job.finished_at, times[number][-1], abs_tol=1e-9)
        assert len(times[number]) == job.output_tokens
        assert (job.cached_tokens, job.preemptions) == told[number]
    assert engine.pool.free == profile.kv_blocks == core.cache.free
    names = sorted(engine.pool.free_named)
    kept = [name for name in names if name < 0]
    assert (len(names) - len(kept), len(kept)) == (core.cache.named, core.cache.boundaries)
    assert engine.waiting_tokens == 0


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(["linear", "roofline", "table"]),
    st.sampled_from([0.0, 0.2]),
    st.integers(1, 300),
    st.integers(1, 70_000),
    st.integers(0, 40),
)
def test_steps_that_are_alike_add_up_to_their_closed_form(step_model, noise, decoding, each, begun):
    profile = replace(PROFILES["8b"], step_model=step_model, noise=noise, noise_seed=3, speed=0.7)
    context = decoding * each - (decoding - 1) // 2
    count = min(profile.steps_alike(begun, decoding, context), 2000)
    times = [
        profile.decode_s(decoding, context + index * decoding) * profile.noise_of(begun + index)
        for index in range(count)
    ]
    growth_s = times[1] - times[0] if count > 1 else 0.0

    assert count >= 1
    assert math.isclose(sum(times), count * times[0] + growth_s * count * (count - 1) / 2, rel_tol=1e-9)
