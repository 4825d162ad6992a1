"""Profiles of two real engines: both traces show what the engines did, and the legs of the same request."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from services.launcher import profiles
from services.launcher.profiles import Chosen
from shared.contracts.ids import RequestId
from shared.contracts.workers import Role
from tests.engines.test_handover import completion, prompt_of
from tests.support.worker_processes import WorkerProcess

pytestmark = pytest.mark.vllm

PAIR = Chosen()


async def test_both_traces_have_the_engines_work_and_the_legs_of_one_request(pair, router, nats_url, tmp_path):
    request_id = RequestId("profiled-1")
    begun = await profiles.start(nats_url, PAIR, "one", 60.0, 200)
    assert (sorted(begun.workers), begun.refused) == (["d1", "p1"], {})
    again = await profiles.start(nats_url, PAIR, "other", 60.0, 200)
    await router.handed_over(*pair, completion(prompt_of(60, seed=90)), request_id=request_id)

    (collected,) = await profiles.stop(nats_url, PAIR, tmp_path)

    assert set(again.refused) == {"p1", "d1"}
    assert "one still runs" in again.refused["p1"]
    assert collected.notes == {}
    index = json.loads((tmp_path / "one" / "index.json").read_text())
    assert [(one["worker"], one["role"]) for one in index["workers"]] == [("d1", "decode"), ("p1", "prefill")]
    for one, kind in zip(index["workers"], ("decode", "prefill"), strict=True):
        (name,) = one["traces"]
        check_trace(tmp_path / "one" / name, f"{kind} {request_id}")
    check_timeline(tmp_path / "one" / "timeline.json", request_id)


def check_trace(path: Path, leg: str) -> None:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    slices = [event for event in events if event.get("ph") == "X"]
    (marked,) = [event for event in slices if event["name"] == leg]
    steps = [event for event in slices if event["name"].startswith("execute_context_")]
    within = [step for step in steps if overlaps(marked, step)]
    assert within, f"no step of the engine at the time of {leg}"
    operators = [event for event in slices if event.get("cat") == "cpu_op"]
    most = max(sum(overlaps(step, operator) for operator in operators) for step in within)
    assert most > 20, "no step shows the model's operators"


def overlaps(one: dict, other: dict) -> bool:
    return one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]


def check_timeline(path: Path, request_id: str) -> None:
    events = json.loads(path.read_text())["traceEvents"]
    legs = {event["name"]: event for event in events if event["ph"] == "X"}
    prefill, decode = legs[f"prefill {request_id}"], legs[f"decode {request_id}"]
    assert prefill["pid"] != decode["pid"]
    assert f"read {request_id}" in legs
    (begins,) = [event for event in events if event["ph"] == "s"]
    (ends,) = [event for event in events if event["ph"] == "f"]
    assert (begins["pid"], ends["pid"]) == (prefill["pid"], decode["pid"])
    assert begins["ts"] <= ends["ts"]


async def test_a_profile_ends_by_itself_and_the_next_one_deletes_it(pair, router, nats_url, tmp_path):
    prefill: WorkerProcess = pair[0]
    only = Chosen(workers=[prefill.worker_id])
    begun = await profiles.start(nats_url, only, "short", 0.3, 200)
    await router.load_where(prefill, lambda _load: b"profile short has ended" in prefill.log.read_bytes())
    (collected,) = await profiles.stop(nats_url, only, tmp_path)
    assert (begun.workers, collected.files[0]) == (["p1"], "p1.pt.trace.json.gz")

    await profiles.start(nats_url, Chosen(role=Role.PREFILL), "steps", 60.0, 1)
    for seed in (91, 92, 93):
        await router.leg(prefill, "aggregated", completion(prompt_of(20, seed=seed)))
    (later,) = await profiles.stop(nats_url, only, tmp_path)

    events = json.loads(gzip.decompress((tmp_path / "steps" / "p1.pt.trace.json.gz").read_bytes()))["traceEvents"]
    steps = [event for event in events if event["name"].startswith("execute_context_")]
    assert 1 <= len(steps) <= 2, "the profile has more steps than were asked for"
    assert later.requests == 3
