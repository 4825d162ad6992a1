"""`baton doctor` finds each fault that there is, says what to do about it, and finds none where there is none."""

from __future__ import annotations

import io

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from services.launcher.doctor.doctor import findings
from services.launcher.doctor.facts import (
    Certificate,
    Disk,
    Engine,
    Gpu,
    HeardLoad,
    InstallationFacts,
    Nats,
    Package,
    Packages,
    Port,
    RouterAnswer,
    SystemFacts,
)
from services.launcher.doctor.findings import Finding, Level, examination
from services.launcher.doctor.picture import draw
from shared.contracts.control import RouterHealth, ServicePhase
from shared.contracts.load import StoreState
from shared.contracts.workers import FleetState, HashScheme, Role, WorkerPhase
from tests.support.examples import examples
from tests.support.fleet_builders import FINGERPRINT, load, record
from tests.unit.launcher.doctored import GIB, installation, living, nats, service, system

MIB = 1 << 20
DAY_S = 86_400.0
GPU = Gpu(name="H100", driver="570.1", memory_bytes=80 * GIB)
ENGINE = installation().engine
assert ENGINE is not None


def engine(**changes: object) -> Engine:
    assert ENGINE is not None
    return msgspec.structs.replace(ENGINE, **changes)


def fleet(*workers: object) -> FleetState:
    return FleetState(leader="o", term=1, workers=list(workers))  # type: ignore[arg-type]


def told(router: RouterHealth) -> dict[str, object]:
    others = [service(kind) for kind in ("orchestrator", "collector")]
    return {"services": [service("router", router=router), *others]}


def with_service(kind: str, **changes: object) -> dict[str, object]:
    """The system's three, of which one is otherwise."""
    return {
        "services": [
            service(one, **(changes if one == kind else {})) for one in ("router", "orchestrator", "collector")
        ]
    }


def double(kind: str) -> dict[str, object]:
    services = [msgspec.structs.replace(one, is_double=one.status.service == kind) for one in system().services]
    return {"services": services}


def skewed(ahead_s: float) -> dict[str, object]:
    return {"services": [msgspec.structs.replace(one, ahead_s=ahead_s) for one in system().services]}


def two_workers(**changes: object) -> dict[str, object]:
    """The second has another fingerprint."""
    other = msgspec.structs.replace(FINGERPRINT, **changes)
    one, two = system().records
    return {"records": [one, msgspec.structs.replace(two, fingerprint=other)]}


def only(*roles: Role) -> dict[str, object]:
    records = [record(f"w{number}", role=role) for number, role in enumerate(roles)]
    return {"records": records, "loads": [HeardLoad(report=load(one.worker_id)) for one in records], "fleet": fleet()}


def changed_record(**changes: object) -> dict[str, object]:
    one, two = system().records
    return {"records": [one, msgspec.structs.replace(two, **changes)]}


def reports(first: HeardLoad) -> dict[str, object]:
    return {"loads": [first, *(one for one in system().loads if one.report.worker_id != first.report.worker_id)]}


def store(kept: int = 10, **lost: int) -> dict[str, object]:
    state = StoreState(disk_blocks=kept, disk_blocks_max=100, **lost)
    return {
        "records": [*system().records, record("s1", role=Role.STORE)],
        "loads": [*system().loads, HeardLoad(report=load("s1", role=Role.STORE, store=state))],
    }


INSTALLATION_FAULTS: dict[str, tuple[dict[str, object], Level, str]] = {
    "python": ({"python": (3, 12, 1)}, Level.ERROR, "Python 3.12.1"),
    "missing package": (
        {"packages": Packages(lock="services", count=9, drift=[Package(name="rich", locked="14.0")])},
        Level.ERROR, "1 locked package missing: rich 14.0",
    ),
    "other package": (
        {"packages": Packages(lock="services", count=9, drift=[Package(name="rich", locked="14.0", installed="13.9")])},
        Level.WARNING, "rich 13.9 (locked: 14.0)",
    ),
    "no lock": ({"packages": Packages()}, Level.NOTE, "not compared"),
    "no vllm": ({"has_vllm": False, "engine": None}, Level.NOTE, "only simulated engines"),
    "not loaded": ({"engine": None}, Level.NOTE, "was not tried"),
    "vllm broken": ({"engine": engine(vllm_failure="ImportError: x")}, Level.ERROR, "vLLM does not load"),
    "nixl broken": ({"engine": engine(nixl_failure="ImportError: x")}, Level.ERROR, "NIXL does not load"),
    "no ucx": ({"engine": engine(plugins=["POSIX"])}, Level.ERROR, "UCX plugin: it is not there"),
    "ucx fails": ({"engine": engine(plugin_failures={"UCX": "no device"})}, Level.ERROR, "UCX plugin: no device"),
    "no posix": ({"engine": engine(plugins=["UCX"])}, Level.NOTE, "POSIX plugin cannot be used"),
    "no nats-server": ({"nats_server": ""}, Level.NOTE, "No nats-server"),
    "index in python": ({"is_index_compiled": False}, Level.WARNING, "runs in Python"),
    "little memory": ({"memory_free_bytes": GIB}, Level.WARNING, "1.0 GiB of 16.0 GiB memory free"),
    "little shm": ({"shm_bytes": 64 * MIB}, Level.WARNING, "(/dev/shm) has only 64.0 MiB"),
    "cpu build on gpus": ({"gpus": [GPU]}, Level.WARNING, "1 GPU: H100 (80.0 GiB), driver 570.1"),
    "gpu not usable": ({"gpus": [GPU], "engine": engine(torch_cuda="12.8")}, Level.ERROR, "1 GPU: H100"),
    "disk almost full": ({"disks": [Disk(what="models", path="/m", free_bytes=GIB)]}, Level.WARNING, "Only 1.0 GiB free"),
    "disk full": ({"disks": [Disk(what="models", path="/m", free_bytes=MIB)]}, Level.ERROR, "Only 1.0 MiB free"),
    "disk refused": ({"disks": [Disk(what="models", path="/m", failure="no")]}, Level.ERROR, "cannot be written"),
    "port taken": (
        {"ports": [Port(number=8000, purpose="the OpenAI API", option="--port", is_free=False, holder=" by pid 3 (x)")]},
        Level.WARNING, "Port 8000, for the OpenAI API, is taken by pid 3 (x).",
    ),
    "another system": ({"others": {"nats://h:1": 4}}, Level.NOTE, "Another system runs here, on nats://h:1 (4 processes)"),
    "exposed": ({"exposed": ["/k/nkey"]}, Level.WARNING, "Other users may read /k/nkey."),
    "certificate ended": ({"certificates": [Certificate(path="c", ends_in_s=-1.0)]}, Level.ERROR, "c has ended"),
    "certificate ends": ({"certificates": [Certificate(path="c", ends_in_s=3 * DAY_S)]}, Level.WARNING, "ends in 3 days"),
    "certificate unread": ({"certificates": [Certificate(path="c", failure="no")]}, Level.ERROR, "cannot be read"),
    "unknown": ({"unknown": {"gpus": "it took too long"}}, Level.NOTE, "GPUs could not be looked at: it took too long."),
}  # fmt: skip

SYSTEM_FAULTS: dict[str, tuple[dict[str, object], Level, str]] = {
    "no nats": ({"nats": None, "failure": "Nobody listens."}, Level.ERROR, "NATS at nats://127.0.0.1:4222 does not answer"),
    "not let in": ({"failure": "no key"}, Level.ERROR, "cannot connect"),
    "no jetstream": ({"nats": nats(jetstream=False)}, Level.ERROR, "JetStream is off"),
    "old nats": ({"nats": nats(version="2.10.1")}, Level.ERROR, "NATS 2.10.1 is older than 2.11"),
    "small payload": ({"nats": nats(max_payload=65536)}, Level.WARNING, "NATS takes only 64.0 KiB"),
    "slow nats": ({"nats": nats(rtt_s=0.2)}, Level.WARNING, "NATS takes 200 ms for a round trip"),
    "open nats": ({"nats_url": "nats://far:4222"}, Level.WARNING, "asks for no credentials"),
    "no router": ({"services": [service("orchestrator"), service("collector")]}, Level.ERROR, "No router was heard"),
    "no orchestrator": ({"services": [service("router"), service("collector")]}, Level.ERROR, "No orchestrator was heard"),
    "no collector": ({"services": [service("router"), service("orchestrator")]}, Level.WARNING, "No collector was heard"),
    "starting": (with_service("router", phase=ServicePhase.STARTING, detail="x"), Level.WARNING, "router is starting: x"),
    "failed": (with_service("router", phase=ServicePhase.FAILED, detail="x"), Level.ERROR, "router-1 has failed"),
    "two of a name": (double("router"), Level.ERROR, "Two processes call themselves router-1"),
    "no leader": ({"fleet": None}, Level.ERROR, "An orchestrator runs, but none leads"),
    "versions": (with_service("router", version="0.2.0"), Level.WARNING, "0.1.0: collector-1, orchestrator-1; 0.2.0: router-1"),
    "own version": ({"baton": "0.2.0"}, Level.NOTE, "The system runs 0.1.0, this command is 0.2.0"),
    "clock ahead": (skewed(61.0), Level.WARNING, "The clock of h is 61.0 s ahead of ours"),
    "clock behind": (skewed(-3600.0), Level.WARNING, "The clock of h is 3600 s behind ours"),
    "router away": ({"routers": [RouterAnswer(url="http://far:1", failure="x")]}, Level.NOTE, "is not reached from here"),
    "router not ready": (
        {"routers": [RouterAnswer(url="http://127.0.0.1:1", detail="no worker is ready")]},
        Level.ERROR, "is not ready: no worker is ready",
    ),
    "no keys": (
        {"routers": [RouterAnswer(url="http://0.0.0.0:1", ready=True, asks_for_key=False)]},
        Level.WARNING, "http://0.0.0.0:1 asks for no API keys.",
    ),
    "no worker": ({"records": [], "loads": [], "fleet": fleet()}, Level.ERROR, "No worker is registered"),
    "none ready": (
        {"records": [record("w1", WorkerPhase.PROBING)], "loads": [HeardLoad(report=load("w1"))], "fleet": fleet()},
        Level.ERROR, "0 of 1 worker ready.",
    ),
    "silent worker": ({"loads": system().loads[:1]}, Level.ERROR, "d1 is registered and was not heard within"),
    "two workers of a name": (reports(HeardLoad(report=load("p1"), is_double=True)), Level.ERROR, "Two processes speak as p1"),
    "earlier life": (changed_record(epoch=5), Level.ERROR, "An earlier life of d1 still speaks"),
    "unregistered": ({"records": system().records[:1]}, Level.WARNING, "d1 reports its load and is not in the registry"),
    "wire": (changed_record(wire_version=3), Level.ERROR, "d1 speaks version 3 of the wire"),
    "no prefix cache": (changed_record(prefix_caching=False), Level.NOTE, "d1 keeps no prefix cache"),
    "lost": ({"fleet": fleet(living(record("w9"), WorkerPhase.LOST))}, Level.WARNING, "w9 was lost 5.00 s ago"),
    "starts for long": ({"fleet": fleet(living(record("w9"), WorkerPhase.STARTING, 900.0))}, Level.WARNING, "starting for 900 s"),
    "probes for long": ({"fleet": fleet(living(record("w9"), WorkerPhase.PROBING, 90.0))}, Level.WARNING, "probing for 90.0 s"),
    "probes": ({"fleet": fleet(living(record("w9"), WorkerPhase.PROBING))}, Level.NOTE, "w9 is probing"),
    "drains": ({"fleet": fleet(living(record("w9"), WorkerPhase.DRAINING))}, Level.NOTE, "w9 is draining"),
    "hardly heard": (
        {"fleet": fleet(msgspec.structs.replace(living(record("w9")), silent_s=8.0))},
        Level.WARNING, "has not heard w9 for 8.00 s",
    ),
    "only prefill": (only(Role.PREFILL, Role.PREFILL), Level.WARNING, "Of m only prefill workers are ready"),
    "only decode": (only(Role.DECODE), Level.WARNING, "Of m only decode workers are ready"),
    "two revisions": (two_workers(revision="r2"), Level.NOTE, "m runs in 2 revisions (r: p1; r2: d1)"),
    "fingerprints": (
        two_workers(dtype="bfloat16", kv_layout="HND"),
        Level.ERROR, "p1 and d1 cannot exchange KV: dtype is float32 and bfloat16; kv_layout is NHD and HND.",
    ),
    "hashing": (
        changed_record(hashing=HashScheme(block_size=16)), Level.WARNING, "Workers of m name their KV blocks differently",
    ),
    "full": (
        reports(HeardLoad(report=load("p1", kv_blocks_used=99, kv_blocks_total=100, waiting=2))),
        Level.WARNING, "The KV cache of p1 is full (99%) and 2 requests wait there",
    ),
    "store full": (store(100), Level.NOTE, "s1 is full: it keeps 100 blocks"),
    "store loses": (store(damaged_blocks_total=2, unsaved_blocks_total=1), Level.WARNING, "s1 has lost 3 blocks"),
    "index degraded": (told(RouterHealth(not_exact={"d1": "degraded"})), Level.NOTE, "is not sure what d1 has cached"),
    "index fallback": (told(RouterHealth(not_exact={"d1": "fallback"})), Level.WARNING, "does not know what d1 has cached"),
    "tokens": (told(RouterHealth(tokens_differ=["d1"])), Level.WARNING, "does not make the tokens that d1 make"),
    "router's index": (told(RouterHealth(is_index_compiled=False)), Level.NOTE, "The prefix index of router-1 runs in Python"),
    "unknown": ({"unknown": {"fleet": "it took too long"}}, Level.NOTE, "The fleet could not be looked at: it took too long."),
}  # fmt: skip


def found(here: InstallationFacts, there: SystemFacts) -> list[Finding]:
    return list(findings(here, there))


def faults(here: InstallationFacts, there: SystemFacts) -> list[Finding]:
    return [one for one in found(here, there) if one.level is not Level.OK]


def test_nothing_is_wrong_with_a_system_that_is_well():
    told = examination(found(installation(), system()), is_running=True)

    assert faults(installation(), system()) == []
    assert told.verdict == "All is well with the system."


@pytest.mark.parametrize("fault", INSTALLATION_FAULTS)
def test_a_fault_of_the_installation_is_found_and_nothing_else_is_wrong(fault: str):
    changes, level, words = INSTALLATION_FAULTS[fault]

    (only_one,) = faults(installation(**changes), system())

    assert only_one.level is level
    assert words in only_one.what
    assert level is Level.NOTE or only_one.todo


@pytest.mark.parametrize("fault", SYSTEM_FAULTS)
def test_a_fault_of_the_system_is_found_and_nothing_worse(fault: str):
    changes, level, words = SYSTEM_FAULTS[fault]

    worse = [Level.OK, Level.NOTE, Level.WARNING, Level.ERROR].index
    all_of_them = faults(installation(), system(**changes))
    (it,) = [one for one in all_of_them if words in one.what]

    assert it.level is level
    assert max(worse(one.level) for one in all_of_them) == worse(level)
    assert level is Level.NOTE or it.why
    assert level is not Level.WARNING or it.todo or it.why


def test_without_a_system_only_the_installation_is_judged():
    nothing = SystemFacts(nats_url="nats://127.0.0.1:4222", failure="Nobody listens.")

    told = examination(found(installation(), nothing), is_running=nothing.is_running)

    assert {one.area.value for one in told.findings} == {"Installation", "This machine"}
    assert told.verdict == "All is well with the installation. Nothing runs here; `baton up` starts it."


def test_without_a_system_a_missing_nats_server_is_in_the_way():
    (it,) = faults(installation(nats_server=""), SystemFacts())

    assert it.level is Level.WARNING
    assert "--nats-url" in it.todo


def test_a_pair_that_fits_makes_a_third_that_does_not_a_warning():
    third = record("w3")
    other = msgspec.structs.replace(third, fingerprint=msgspec.structs.replace(FINGERPRINT, dtype="x"))
    changes = {"records": [*system().records, other], "loads": [*system().loads, HeardLoad(report=load("w3"))]}

    (it,) = faults(installation(), system(**changes))

    assert (it.level, it.what) == (Level.WARNING, "d1, p1 and w3 cannot exchange KV: dtype is float32 and x.")


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_picture_fits_and_says_everything(columns: int, encoding: str):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    there = system(**two_workers(dtype="bfloat16"))
    told = examination(found(installation(is_index_compiled=False), there), is_running=True)

    draw(told, Console(file=out, width=columns, no_color=True))
    out.flush()

    lines = raw.getvalue().decode(encoding).split("\n")
    assert max(map(len, lines)) <= columns
    assert not [line for line in lines if line != line.rstrip()]
    joined = " ".join(" ".join(lines).split())
    for finding in told.findings:
        assert finding.what in joined
        assert finding.todo in joined
    assert joined.endswith("1 error and 1 warning: the system does not work as it should.")


ANY_CHANGES = st.dictionaries(
    st.sampled_from(list(SYSTEM_FAULTS)), st.none(), max_size=4
).map(lambda chosen: {key: value for name in chosen for key, value in SYSTEM_FAULTS[name][0].items()})  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(changes=ANY_CHANGES, left_out=st.sets(st.sampled_from(sorted(system().__struct_fields__))))
def test_whatever_is_wrong_and_whatever_is_not_known_there_are_findings_and_no_crash(
    changes: dict[str, object], left_out: set[str]
):
    known = {name: getattr(system(**changes), name) for name in SystemFacts.__struct_fields__ if name not in left_out}

    told = examination(found(InstallationFacts(), SystemFacts(**known)), is_running=True)

    assert told.errors == sum(one.level is Level.ERROR for one in told.findings)
    assert all(one.what for one in told.findings)


def test_old_servers_that_say_little_are_told_of_as_far_as_they_go():
    assert found(InstallationFacts(), SystemFacts(nats=Nats(), nats_url="x"))
