"""Workloads, measured speeds and simulations of a plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest

from replay.capacity.plan import Impossible, Inputs, case_of, make_plan
from replay.capacity.speeds import EngineSpeeds, SpeedsError, profile_of, read_speeds, speeds_of
from replay.capacity.trial import Case, Question, Runner, Target, runner, try_out
from replay.capacity.workload import Workload, busiest, generated, rate_of, read_workload, summary_of
from replay.profile import PROFILES, Profile
from replay.split import Split, SplitError, split_of
from replay.traces import Request, TraceError
from replay.world import World
from tests.support.replay_worlds import PROFILE, conversations, write_mooncake

TARGET = Target(ttft_s=2.0, itl_s=0.1, share=0.9)
SPLITS = [Split(both=2), Split(1, 1, 0), Split(1, 0, 1)]


def case(requests: list[Request], profile: Profile = PROFILE, too_large: int = 0) -> Case:
    return Case(
        requests=requests, whole=requests, too_large=too_large, whole_too_large=0, profile=profile, target=TARGET
    )


def inputs(requests: list[Request], *, profile: Profile = PROFILE, target: Target = TARGET, sample: int = 0) -> Inputs:
    return Inputs(
        workload=Workload(name="test", requests=requests),
        profile=profile,
        engine="test",
        measured=False,
        gpus_per_worker=1,
        target=target,
        sample=sample,
    )


# Simulations.


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_request_is_in_time_late_slow_or_refused(split):
    trial = try_out(case(conversations(80)), Question(split, load=6.0, to_the_end=True))

    assert not trial.stopped
    missed = trial.late + trial.slow + trial.refused
    assert 0 < missed < 80
    assert trial.in_time == pytest.approx(1 - missed / 80)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_an_overload_ends_early_with_an_upper_bound(split):
    overload = Question(split, load=30.0)
    stopped = try_out(case(conversations(200)), overload)
    full = try_out(case(conversations(200)), msgspec.structs.replace(overload, to_the_end=True))

    assert stopped.stopped
    assert full.in_time <= stopped.in_time < TARGET.share
    assert not stopped.keeps(0.1)


def test_requests_that_no_engine_has_room_for_count_as_missed():
    trial = try_out(case(conversations(30), too_large=10), Question(Split(both=2), load=0.5))

    assert trial.requests == 40
    assert trial.in_time == pytest.approx(0.75)
    assert trial.refused == 10


@pytest.mark.slow
def test_processes_find_what_one_process_finds():
    given = case(conversations(30))
    questions = [Question(split, load) for split in SPLITS for load in (1.0, 3.0)]

    def without_cpu(trials):
        return [msgspec.structs.replace(trial, cpu_s=0.0) for trial in trials]

    with runner(given, 2) as two:
        assert without_cpu(two.ask(questions)) == without_cpu(Runner(given, 1, None).ask(questions))


@pytest.mark.parametrize("text", ["", "4", "B", "3P", "2D", "0B", "3P+", "1P-1D", "4X"])
def test_a_split_that_cannot_serve_is_refused(text):
    with pytest.raises(SplitError):
        split_of(text)


@pytest.mark.parametrize("split", [*SPLITS, Split(2, 3, 4)], ids=str)
def test_a_split_is_read_as_it_is_written(split):
    assert split_of(split.short) == split


# Plans.


@pytest.mark.slow
def test_a_plan_recommends_what_keeps_the_targets_and_says_how_far():
    given = inputs(conversations(60))
    made, notes = case_of(given)
    one = Runner(made, 1, None)

    plan = make_plan(given, notes, one, 2)

    assert plan.enough
    assert plan.headroom > 1
    at_limit = try_out(made, Question(plan.best.split, plan.headroom))
    assert at_limit.keeps(TARGET.share)
    for result in plan.splits:
        assert result.split.workers == 2
        assert result.limit.keeps <= plan.headroom
    assert plan.smallest is not None
    assert plan.smallest.keeps(TARGET.share)
    assert plan.whole is None


def test_the_best_split_of_a_piece_is_tried_on_the_whole_workload():
    given = inputs(conversations(60), sample=20)
    made, notes = case_of(given)

    plan = make_plan(given, notes, Runner(made, 1, None), 1)

    assert plan.searched.requests == 20
    assert plan.whole is not None
    assert plan.whole.requests == 60


@pytest.mark.slow
def test_without_a_number_of_gpus_the_plan_is_of_the_smallest_fleet():
    requests = [replace(request, at_s=request.at_s / 8) for request in conversations(60)]
    given = inputs(requests)
    made, notes = case_of(given)

    plan = make_plan(given, notes, Runner(made, 1, None), 0)

    assert plan.enough
    assert plan.smallest is not None
    assert plan.workers == plan.smallest.split.workers > 1


def test_impossible_targets_name_a_request_and_what_would_be_possible():
    requests = conversations(20)
    requests[6] = replace(requests[6], input_tokens=25_000, blocks=())
    target = Target(ttft_s=1.0, itl_s=0.1, share=1.0)

    with pytest.raises(Impossible, match=r"request 7 with 25,000 \+") as raised:
        case_of(inputs(requests, target=target))

    found = re.search(r"--ttft (\S+) and --itl (\S+?);", str(raised.value))
    assert found is not None
    possible = Target(ttft_s=float(found[1]), itl_s=float(found[2]), share=1.0)
    _case, notes = case_of(inputs(requests, target=possible))
    assert not notes


def test_a_request_larger_than_a_cache_is_named_and_the_plan_goes_on():
    requests = conversations(20)
    requests[3] = replace(requests[3], input_tokens=40_000, blocks=())

    made, notes = case_of(inputs(requests))

    assert "request 4 with 40,000 +" in notes[0]
    assert (len(made.requests), made.too_large) == (19, 1)


# Workloads.


def test_a_routers_log_becomes_requests_that_share_what_was_cached(tmp_path):
    began = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
    facts = [(10.0, 2.0, 2048, 40, 0), (11.0, 8.0, 3000, 50, 0), (12.0, 1.0, 4096, 60, 1024), (13.0, 1.0, 600, 7, 512)]
    lines = [{"time": "2026-11-01T00:00:00Z", "logger": "router", "message": "listening"}]
    for ended_s, took_s, prompt, output, cached in facts:
        time = datetime.fromtimestamp(began + ended_s, UTC).isoformat().replace("+00:00", "Z")
        lines.append(
            {
                "time": time,
                "logger": "router",
                "message": "request",
                "e2e_s": took_s,
                "prompt_tokens": prompt,
                "completion_tokens": output,
                **({"cached_tokens": cached} if cached else {}),
            }
        )
    lines.append({"time": "2026-11-01T00:00:20Z", "logger": "router", "message": "request", "status": 429})
    path = tmp_path / "router.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "not JSON\n")

    read = read_workload(path, seed=0).requests

    assert [(round(one.at_s, 3), one.input_tokens, one.output_tokens) for one in read] == [
        (0.0, 3000, 50),
        (5.0, 2048, 40),
        (8.0, 4096, 60),
        (9.0, 600, 7),
    ]
    assert read[2].blocks[:2] == read[1].blocks[:2]
    assert read[3].blocks == read[2].blocks[:1]
    assert summary_of(read).shared == pytest.approx((1024 + 512) / 9744)


def test_a_log_without_finished_requests_is_an_error(tmp_path):
    path = tmp_path / "router.log"
    path.write_text('{"time": "2026-11-01T00:00:00Z", "logger": "router", "message": "listening"}\n')

    with pytest.raises(TraceError, match="no finished requests"):
        read_workload(path, seed=0)


def test_a_trace_is_read_as_the_replay_reads_it(tmp_path):
    read = read_workload(write_mooncake(tmp_path / "trace.jsonl", conversations(30)), seed=0)

    assert len(read.requests) == 30


def test_generated_requests_have_the_wanted_rate_and_means():
    size = summary_of(generated(5.0, 2000, 300, count=20_000, seed=1).requests)

    assert size.requests_per_s == pytest.approx(5.0, rel=0.03)
    assert size.prompt_tokens == pytest.approx(2000, rel=0.03)
    assert size.output_tokens == pytest.approx(300, rel=0.03)
    assert size.shared == 0.0


@pytest.mark.parametrize(("text", "rate"), [("5", 5), ("5/s", 5), ("300/min", 5), ("18000/h", 5), (" 0.5 / S ", 0.5)])
def test_rates_have_units(text, rate):
    assert rate_of(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "s", "5/day", "-1/s", "0/s", "1.2.3/s", "./s"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError):
        rate_of(text)


def test_the_busiest_part_has_the_most_tokens_per_second():
    quiet = [Request(float(second), (), 100, 10) for second in range(50)]
    busy = [Request(50 + second / 10, (), 100, 10) for second in range(20)]

    part = busiest([*quiet, *busy], 10)

    assert part[0].at_s == 0.0
    assert part[-1].at_s == pytest.approx(0.9)


# Speeds.


def test_with_speeds_that_workers_learned_a_simulation_says_what_it_says_with_the_true_ones():
    slower = {"prefill_s_per_pair": 5e-8, "decode_per_context_token_s": 4e-7}
    true = replace(PROFILE, **slower, kv_blocks=400, max_num_seqs=256)
    world = World(Split(prefill=1, decode=1), true)
    world.run(conversations(300))
    workers = list(world.workers.values())

    speeds = speeds_of([worker.record for worker in workers], [worker.load_now() for worker in workers])

    learned = profile_of(speeds, PROFILES["8b"])
    assert learned.kv_blocks == true.kv_blocks
    question = Question(Split(1, 1), load=0.4, to_the_end=True)
    wanted, found = (try_out(case(conversations(200, seed=2), profile), question) for profile in (true, learned))
    assert found.in_time == pytest.approx(wanted.in_time, abs=0.03)
    assert found.ttft.p50 == pytest.approx(wanted.ttft.p50, rel=0.15)
    assert found.itl.p50 == pytest.approx(wanted.itl.p50, rel=0.15)


def test_speeds_of_idle_or_unknown_workers_are_refused():
    world = World(Split(both=1), PROFILE)
    (worker,) = world.workers.values()

    with pytest.raises(SpeedsError, match="have not measured"):
        speeds_of([worker.record], [worker.load_now()])
    with pytest.raises(SpeedsError, match="No worker serves other"):
        speeds_of([worker.record], [], "other")
    with pytest.raises(SpeedsError, match="No worker with an engine"):
        speeds_of([], [])


SPEEDS = EngineSpeeds(
    model="m",
    gpus=2,
    prefill_step_s=0.001,
    prefill_token_s=1e-4,
    prefill_pair_s=1e-9,
    decode_step_s=0.01,
    decode_request_s=1e-4,
    decode_context_token_s=1e-8,
    kv_tokens=100_000,
)


def test_a_file_of_speeds_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "speeds.json"
    path.write_bytes(msgspec.json.encode(SPEEDS))

    assert read_speeds(path) == SPEEDS


@pytest.mark.parametrize(
    "change", [{"kv_tokens": 0}, {"decode_step_s": -1.0}, {"prefill_pair_s": -1.0}, {"other": 1}, {"gpus": "two"}]
)
def test_a_file_of_impossible_speeds_is_refused(tmp_path, change):
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps({**json.loads(msgspec.json.encode(SPEEDS)), **change}))

    with pytest.raises(SpeedsError):
        read_speeds(path)
