"""``baton profile stop``: what workers answer becomes files; nothing that one answers becomes a path or fills a disk."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from services.launcher.bus_client import CommandFailed
from services.launcher.cli import app
from services.launcher.profiles import _checked, _collect, timeline
from shared.contracts.channels import READ_TRACE
from shared.contracts.ids import Epoch, RequestId, WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.profiling import (
    LEGS_NOTED_MAX,
    PART_BYTES_MAX,
    TRACE_BYTES_MAX,
    ProfiledLeg,
    ProfileStopped,
    ReadTrace,
    TracePart,
)
from shared.contracts.workers import Role
from tests.support.memory_bus import MemoryBus, MemoryHub

TRACE = bytes(range(256)) * 5000


def leg(kind: LegKind, began_ns: int, ended_ns: int, first_ns: int = 0) -> ProfiledLeg:
    return ProfiledLeg(
        request_id=RequestId("q1"), kind=kind, began_ns=began_ns, ended_ns=ended_ns, first_token_ns=first_ns
    )


def stopped(worker_id: str, role: Role = Role.PREFILL, **fields) -> ProfileStopped:
    return ProfileStopped(worker_id=WorkerId(worker_id), epoch=Epoch(1), role=role, **{"profile_id": "one", **fields})


async def worker(hub: MemoryHub, worker_id: str, trace: bytes) -> None:
    async def answer(ask: ReadTrace, _envelope: object) -> TracePart:
        data = trace[ask.offset : ask.offset + PART_BYTES_MAX]
        return TracePart(worker_id=WorkerId(worker_id), epoch=Epoch(1), data=data)

    await MemoryBus(hub).answer(READ_TRACE, answer, worker_id=worker_id)


async def test_traces_of_all_workers_come_into_one_folder_with_an_index(tmp_path):
    hub = MemoryHub()
    await worker(hub, "p1", TRACE)
    await worker(hub, "d1", TRACE[:10])
    profile = [
        stopped("p1", traces=[len(TRACE)], host="gpu-1", legs=[leg(LegKind.PREFILL, 0, 10)]),
        stopped("d1", Role.DECODE, traces=[10, 10], legs=[leg(LegKind.DECODE, 0, 30)]),
    ]

    collected = await _collect(MemoryBus(hub), profile, tmp_path / "one")

    assert (tmp_path / "one" / "p1.pt.trace.json.gz").read_bytes() == TRACE
    assert (tmp_path / "one" / "d1-1.pt.trace.json.gz").read_bytes() == TRACE[:10]
    index = json.loads((tmp_path / "one" / "index.json").read_text())["workers"]
    assert [(one["worker"], one["role"], one["host"], len(one["traces"]), one["requests"]) for one in index] == [
        ("d1", "decode", "", 2, ["q1"]), ("p1", "prefill", "gpu-1", 1, ["q1"])
    ]  # fmt: skip
    assert (collected.requests, collected.notes) == (1, {})


async def test_a_trace_that_ends_too_early_is_left_out_and_told(tmp_path):
    hub = MemoryHub()
    await worker(hub, "p1", TRACE[:100])

    collected = await _collect(MemoryBus(hub), [stopped("p1", traces=[len(TRACE)])], tmp_path / "one")

    assert collected.files == ["timeline.json", "index.json"]
    assert "shorter than it says" in collected.notes["p1"]
    assert not list(tmp_path.glob("one/*.gz"))


@pytest.mark.parametrize(
    "fields",
    [{"profile_id": "../../etc"}, {"profile_id": ""}, {"traces": [TRACE_BYTES_MAX + 1]}, {"traces": [-1]}, {"traces": [1] * 65}],
)  # fmt: skip
def test_a_hostile_worker_names_no_path_and_no_size(fields):
    with pytest.raises(CommandFailed):
        _checked(stopped("p1", **fields))


def test_legs_beyond_the_bound_are_dropped():
    many = [leg(LegKind.PREFILL, 0, 1)] * (LEGS_NOTED_MAX + 1)
    assert len(_checked(stopped("p1", legs=many)).legs) == LEGS_NOTED_MAX


def test_the_timeline_has_an_arrow_from_the_first_token_to_the_decode_leg():
    workers = [
        stopped("d1", Role.DECODE, began_ns=1000, legs=[leg(LegKind.DECODE, 2000, 9000, 5000)]),
        stopped("p1", began_ns=2000, legs=[leg(LegKind.PREFILL, 2000, 4500, 4000)]),
    ]

    events = json.loads(timeline(workers))["traceEvents"]

    (begins,) = [event for event in events if event["ph"] == "s"]
    (ends,) = [event for event in events if event["ph"] == "f"]
    assert (begins["pid"], begins["ts"], ends["pid"], ends["ts"]) == (2, 3.0, 1, 4.0)
    assert {event["args"]["name"].split()[0] for event in events if event["name"] == "process_name"} == {"p1", "d1"}


@pytest.mark.parametrize("command", [["start"], ["stop", "p1", "--json"]])
def test_the_command_says_that_no_system_runs(tmp_path, command):
    state = str(tmp_path)
    done = CliRunner().invoke(app, ["profile", *command, "--nats-url", "nats://127.0.0.1:1", "--state-dir", state])

    assert done.exit_code == 1
    assert "NATS at nats://127.0.0.1:1 does not respond" in done.output


def test_only_worker_ids_are_taken():
    done = CliRunner().invoke(app, ["profile", "start", "p 1.>"])

    assert done.exit_code == 1
    assert "is not a worker id" in done.output
