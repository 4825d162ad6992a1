"""The placement study: what a row depends on, what is run again, and a page that cannot be older than it says."""

from __future__ import annotations

import sys
from math import inf
from pathlib import Path

import msgspec
import pytest

from bench.policies import BATON_WAITING
from bench.policies.systems import parse
from bench.study import code_digest, page
from bench.study.__main__ import study
from bench.study.code_digest import BATON_ONLY, DEPENDS, IGNORED, ROOT, files_of
from bench.study.experiment import Setting, run
from bench.study.plan import LOADS, PLAN, Fleet, Plan, Section, Workload, chosen, frozen, quick, whole
from bench.study.results import Slo
from bench.study.rows import Data, Group, finite, group_of, value_of
from bench.study.runs import KNEE_RATIO, Failed, Store, Workshop, find_knee, in_parallel
from replay.profile import PROFILES
from replay.split import Split
from replay.traces import read_trace
from services.router.admission import queues
from tests.support.replay_worlds import PROFILE, conversations, write_mooncake

POLICIES = (BATON_WAITING, "mooncake", "random")
TINY = Workload(name="tiny", is_trace=True)
PAGE = f"# Head\n\n{page.BEGIN}\n{page.NEVER_MEASURED}.\n{page.END}\n\nThe end.\n"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    trace = write_mooncake(folder / "trace.jsonl", conversations(40))
    return Workshop(folder / "runs", {"tiny": trace}, Slo())


@pytest.fixture(scope="module")
def group(workshop) -> Group:
    fleet = Fleet(both=1)
    runs = {
        policy: [workshop.run(workshop.case(TINY, fleet, 1.0, policy, seed)) for seed in (1, 2)] for policy in POLICIES
    }
    bounds = [workshop.bound(TINY, fleet, 1.0, seed) for seed in (1, 2)]
    return group_of(("targets", "knee"), runs, bounds, "commit", is_tuned=True)


@pytest.fixture
def data(group) -> Data:
    slo = Slo()
    return Data(
        command="make bench-replay",
        machine="a machine",
        is_quick=False,
        ttft_s=slo.ttft_s,
        itl_s=slo.itl_s,
        missing=["azure-conversations"],
        groups=[group],
    )


def test_every_policy_of_the_plan_exists_and_every_profile():
    for section in (one for plan in (PLAN, quick(PLAN), whole(PLAN)) for one in plan.sections.values()):
        for policy in section.policies:
            parse(policy)
        assert all(fleet.profile in PROFILES and fleet.split.roles() for fleet in section.fleets)
        assert set(section.loads) <= LOADS.keys()


def test_rivals_run_with_tuned_values_where_there_are_targets_and_baton_with_defaults():
    targets, default, cells = (PLAN.sections[name] for name in ("targets", "default", "factorial"))

    assert targets.run_as("dynamo-queue") == frozen().name("dynamo-queue") != "dynamo-queue"
    assert targets.run_as(BATON_WAITING) == BATON_WAITING != frozen().name(BATON_WAITING)
    assert [default.run_as(policy) for policy in default.policies] == list(default.policies)
    assert all(parse(cells.run_as(policy)).named({}) == policy for policy in cells.policies)


def test_a_trace_that_no_seed_changes_has_one_seed(tmp_path):
    targets = PLAN.sections["targets"]
    azure = next(one for one in targets.workloads if one.name == "azure-conversations")
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")

    assert read_trace(path, seed=1) == read_trace(path, seed=2)
    assert list(targets.seeds_of(azure)) == [1]
    assert len(targets.seeds_of(targets.workloads[0])) == targets.seeds == 10


def test_what_has_no_trace_is_left_out_and_named():
    plan, missing = chosen(PLAN, ["targets"], ["azure-conversations"])

    assert list(plan.sections) == ["targets"]
    assert missing == ["mooncake-conversations"]
    assert {one.name for one in plan.sections["targets"].workloads if one.is_trace} == {"azure-conversations"}


def executed_by(policy: str) -> set[str]:
    """Files of the repository whose functions a run calls."""
    seen: set[str] = set()

    def called(frame, event, _argument):
        if event == "call":
            seen.add(frame.f_code.co_filename)

    setting = Setting(requests=conversations(15), split=Split(prefill=1, decode=1), profile=PROFILE, slo=Slo(), seed=1)
    sys.setprofile(called)
    try:
        run(setting, policy, 1.0)
    finally:
        sys.setprofile(None)
    return {str(Path(name).relative_to(ROOT)) for name in seen if name.startswith(f"{ROOT}/")}


@pytest.mark.skipif(Path(queues.__file__).suffix != ".py", reason="the profiler sees no calls of compiled modules")
def test_only_batons_runs_execute_what_only_their_digest_covers():
    policies = {one.partition("+")[0] for section in PLAN.sections.values() for one in section.policies}
    others = {one for one in policies if not code_digest.is_own(one)} | {"mooncake+edf+refuse"}

    assert executed_by(BATON_WAITING) & set(BATON_ONLY)
    for policy in sorted(others):
        assert not executed_by(policy) & set(BATON_ONLY), policy


def test_all_that_a_run_of_a_policy_executes_is_in_its_digest():
    own, others = ({str(path.relative_to(ROOT)) for path in files_of(own=is_own)} for is_own in (True, False))
    folders = ("bench/", "replay/", "services/router/", "services/worker/", "shared/engine_speed/")

    for policy, covered in ((BATON_WAITING, own), ("dynamo-queue", others), ("mooncake+edf+refuse", others)):
        executed = {name for name in executed_by(policy) if name.startswith(folders)}
        assert executed
        assert executed <= covered


def test_every_file_of_the_digest_exists():
    assert all((ROOT / name).is_file() for name in (*BATON_ONLY, *IGNORED))
    assert all(any(ROOT.glob(pattern)) for pattern in DEPENDS)


def test_a_run_that_is_kept_is_not_repeated_and_another_input_is_another_run(workshop):
    case = workshop.case(TINY, Fleet(both=1), 2.0, "random", 1)
    first = workshop.run(case)

    assert workshop.run(case).ended_at == first.ended_at
    others = [
        workshop.case(TINY, Fleet(both=1), 2.0, "random", 2),
        workshop.case(TINY, Fleet(both=1), 2.1, "random", 1),
        workshop.case(TINY, Fleet(both=2), 2.0, "random", 1),
        workshop.case(TINY, Fleet(both=1), 2.0, "round-robin", 1),
        msgspec.structs.replace(case, slo=Slo(ttft_s=4.0)),
        msgspec.structs.replace(case, trace="another"),
        msgspec.structs.replace(case, code="another"),
    ]
    assert len({one.key for one in [case, *others]}) == 8
    assert not any(Store(workshop.folder).has(one) for one in others)


def test_a_damaged_file_is_run_again(workshop):
    case = workshop.case(TINY, Fleet(both=1), 2.0, "random", 3)
    workshop.run(case)
    (workshop.folder / f"{case.key}.run").write_bytes(b"half")

    assert workshop.run(case).result.requests == 40


@pytest.mark.slow
def test_the_study_runs_a_whole_plan_in_processes(workshop):
    section = Section(
        title="T",
        text="",
        workloads=(TINY,),
        fleets=(Fleet(both=1),),
        loads=("light",),
        policies=("mooncake", "random"),
        seeds=2,
    )
    plan = Plan(sections={"targets": section})
    (found,) = study(plan, workshop, 2)

    assert [row.policy for row in found.rows] == ["mooncake", "random"]
    assert found.requests == 80
    assert all(value_of(row.goodput[0]) <= found.bound_per_s + 1e-9 for row in found.rows)


def test_one_failure_stops_no_other_run_and_fails_the_study():
    done = []
    with pytest.raises(Failed, match="bad: ZeroDivisionError"):
        done.extend(in_parallel(2, {"bad": (1, 0), "good": (9, 4)}, divmod))

    assert done == [("good", (2, 1))]


@pytest.mark.parametrize("knee", [0.03, 0.9, 1.0, 7.7, 130.0])
def test_the_knee_is_found_from_either_side(knee):
    found = find_knee(lambda load: load <= knee, 1.0)

    assert knee / KNEE_RATIO**1.2 <= found <= knee * 1.01


def test_baton_is_compared_with_the_best_rival_of_each_measure(group):
    (versus,) = group.versus
    rows = {row.policy: row for row in group.rows}

    assert versus.policy == BATON_WAITING
    best = max(("mooncake", "random"), key=lambda name: rows[name].good_share[0])
    assert rows[versus.rivals["good_share"]].good_share == rows[best].good_share
    low, high = versus.differences["good_share"][1:]
    assert value_of(low) <= value_of(versus.differences["good_share"][0]) <= value_of(high)


def test_the_page_has_its_rows_and_says_what_was_not_measured(data):
    text = page.with_measured(PAGE, data, ["goodput"])

    assert text.startswith("# Head\n")
    assert text.endswith("The end.\n")
    assert page.NEVER_MEASURED not in text
    assert "azure-conversations" in text
    assert all(f"\n| {policy} | " in text for policy in (*POLICIES, "*bound*"))
    assert "tiny (tuned on)" in text
    assert page.OLDER not in text


def test_the_goal_is_missed_where_baton_is_surely_below_or_does_not_lead_at_the_knee(group):
    (versus,) = group.versus

    def goal(good, tokens, p95, *, label="knee", bound=100.0) -> str:
        differences = {"good_share": good, "good_tokens_share": tokens, "ttft_p95": p95}
        changed = msgspec.structs.replace(group, label=label, bound_per_s=bound)
        return page.goal(changed, msgspec.structs.replace(versus, differences=differences))

    even, ahead, behind = (0.0, -0.01, 0.01), (0.12, 0.1, 0.14), (-0.1, -0.12, -0.08)
    assert goal(ahead, even, even) == goal(even, even, (-0.3, -0.4, -0.2)) == "met"
    assert goal(even, even, even) == "missed: lead"
    assert goal(even, even, even, label="light") == "met"
    assert goal(even, even, even, bound=0.0) == "met"
    assert goal(behind, even, even, label="light") == "missed: goodput"
    assert goal(ahead, behind, even) == "missed: tokens"


def test_the_factorial_is_a_table_of_rules_by_queue_and_refusal(group):
    row = group.rows[0]
    cells = [msgspec.structs.replace(row, policy=name) for name in ("sglang", "sglang+edf+refuse", "dynamo")]
    lines = page.matrix_lines(msgspec.structs.replace(group, rows=cells), code_digest.code_of)

    assert lines[2:4] == ["| rule | at once | edf, refuse |", "|---|---:|---:|"]
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| sglang", "| dynamo"]


def test_rows_survive_being_kept(data, tmp_path):
    page.write(data, tmp_path / "rows.json")

    assert page.read(tmp_path / "rows.json") == data
    assert finite(inf) is None
    assert value_of(None) == inf


def test_a_row_that_is_older_than_the_code_is_found_and_must_be_marked(data, tmp_path):
    rows, written = tmp_path / "rows.json", tmp_path / "page.md"
    page.write(data, rows)
    written.write_text(page.with_measured(PAGE, data, []))

    def changed(policy):
        return "new" if policy == "mooncake" else code_digest.code_of(policy)

    assert page.problems(written, rows, []) == page.stale(data) == []
    assert page.stale(data, changed) == ["targets, tiny, 1 both (8b), knee: mooncake"]
    (problem,) = page.problems(written, rows, [], changed)
    assert "--mark" in problem
    written.write_text(page.with_measured(written.read_text(), data, [], changed))
    assert f"\n| mooncake {page.OLDER} |" in written.read_text()
    assert f"\n| random {page.OLDER} |" not in written.read_text()
    assert page.problems(written, rows, [], changed) == []


def test_a_page_that_was_edited_by_hand_is_found(data, tmp_path):
    rows, written = tmp_path / "rows.json", tmp_path / "page.md"
    page.write(data, rows)
    written.write_text(page.with_measured(PAGE, data, []).replace("| random |", "| rndom |", 1))

    assert len(page.problems(written, rows, [])) == 1


def test_a_page_without_rows_must_say_that_it_is_old(tmp_path):
    written = tmp_path / "page.md"
    written.write_text(PAGE)
    assert page.problems(written, tmp_path / "none.json", []) == []

    written.write_text(PAGE.replace(page.NEVER_MEASURED, ""))
    assert len(page.problems(written, tmp_path / "none.json", [])) == 1
