"""`baton doctor` finds each fault with its remedy, and none in a healthy system."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from services.launcher.commands.doctor import draw
from services.launcher.doctor.doctor import findings
from services.launcher.doctor.findings import (
    Certificate,
    Disk,
    Engine,
    Finding,
    Gpu,
    HeardLoad,
    InstallationFacts,
    Level,
    Nats,
    Package,
    Packages,
    Port,
    Refusal,
    RouterReply,
    SystemFacts,
    examination,
)
from services.launcher.doctor.workers import SLOW_BYTES_PER_S
from shared.contracts.control import DiskFolder, DiskSpace, RouterHealth, ServicePhase
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvExchangeState
from shared.contracts.load import StoreState
from shared.contracts.message import WIRE_VERSION
from shared.contracts.workers import FleetState, HashScheme, KvMemory, KvReadSpeed, Role, WorkerPhase
from tests.support.examples import examples
from tests.support.fleet_builders import FINGERPRINT, adapter, load, record
from tests.unit.launcher.healthy_system import GIB, installation, living, nats, service, system
from tests.unit.observability.expressions import ALERTS

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


def with_router(router: RouterHealth) -> dict[str, object]:
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
    services = [msgspec.structs.replace(one, is_duplicate=one.status.service == kind) for one in system().services]
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


def adapters_differ() -> dict[str, object]:
    pairs = zip(system().records, ("1", "2"), strict=True)
    return {"records": [msgspec.structs.replace(one, adapters=[adapter("sql", digest)]) for one, digest in pairs]}


def reading(bytes_per_s: float, memory: str = "cuda", source: str = "p1", way: str = "") -> dict[str, object]:
    speed, of = int(bytes_per_s), KvMemory(memory)
    return changed_record(kv_reads=[KvReadSpeed(source_id=WorkerId(source), bytes_per_s=speed, memory=of, way=way)])


def reports(first: HeardLoad) -> dict[str, object]:
    return {"loads": [first, *(one for one in system().loads if one.report.worker_id != first.report.worker_id)]}


def store(kept: int = 10, **lost: float) -> dict[str, object]:
    state = StoreState(disk_blocks=kept, disk_blocks_max=100, **lost)
    return {
        "records": [*system().records, record("s1", role=Role.STORE)],
        "loads": [*system().loads, HeardLoad(report=load("s1", role=Role.STORE, store=state))],
    }


def copies(lost: int, copied: int) -> dict[str, object]:
    state = KvExchangeState(lost_blocks_total=lost, copied_blocks_total=copied)
    return reports(HeardLoad(report=load("p1", exchange=state)))


def disks(free: float) -> list[DiskSpace]:
    return [DiskSpace(folder=DiskFolder.STATE, free_bytes=int(free), size_bytes=10**12)]


INSTALLATION_FAULTS: dict[str, tuple[dict[str, object], Level, str]] = {
    "python": ({"python": (3, 14, 1)}, Level.ERROR, "Python 3.14.1"),
    "missing package": (
        {"packages": Packages(lock="services", count=9, drift=[Package(name="rich", locked="14.0")])},
        Level.ERROR, "1 locked package missing: rich 14.0",
    ),
    "other package": (
        {"packages": Packages(lock="services", count=9, drift=[Package(name="rich", locked="14.0", installed="13.9")])},
        Level.WARNING, "rich 13.9 (locked: 14.0)",
    ),
    "no lock": ({"packages": Packages()}, Level.NOTE, "not checked"),
    "no vllm": ({"has_vllm": False, "engine": None}, Level.NOTE, "only simulated engines"),
    "not loaded": ({"engine": None}, Level.NOTE, "was skipped"),
    "vllm broken": ({"engine": engine(vllm_failure="ImportError: x")}, Level.ERROR, "vLLM does not load"),
    "vllm unsupported": (
        {"engine": engine(vllm="0.31.0", vllm_refused="Baton supports others")},
        Level.ERROR,
        "vLLM 0.31.0 is not supported",
    ),
    "nixl broken": ({"engine": engine(nixl_failure="ImportError: x")}, Level.ERROR, "NIXL does not load"),
    "no ucx": ({"engine": engine(plugins=["POSIX"])}, Level.ERROR, "UCX plugin: it is missing"),
    "ucx fails": ({"engine": engine(plugin_failures={"UCX": "no device"})}, Level.ERROR, "UCX plugin: no device"),
    "no posix": ({"engine": engine(plugins=["UCX"])}, Level.NOTE, "POSIX plugin cannot be used"),
    "no nats-server": ({"nats_server": ""}, Level.NOTE, "No nats-server"),
    "index in python": ({"is_index_compiled": False}, Level.WARNING, "The prefix index runs in Python."),
    "placement in python": ({"is_placement_compiled": False}, Level.WARNING, "The placement runs in Python."),
    "both in python": (
        {"is_index_compiled": False, "is_placement_compiled": False},
        Level.WARNING, "The prefix index and placement run in Python.",
    ),
    "all in python": (
        {"is_index_compiled": False, "is_placement_compiled": False, "is_tokenization_compiled": False, "is_request_path_compiled": False},
        Level.WARNING, "The prefix index, placement, tokenization and request path run in Python.",
    ),
    "little memory": ({"memory_free_bytes": GIB}, Level.WARNING, "1.0 GiB of 16.0 GiB memory free"),
    "little shm": ({"shm_bytes": 64 * MIB}, Level.WARNING, "(/dev/shm) has only 64.0 MiB"),
    "cpu build on gpus": ({"gpus": [GPU]}, Level.WARNING, "1 GPU: H100 (80.0 GiB), driver 570.1"),
    "gpu not usable": ({"gpus": [GPU], "engine": engine(torch_cuda="12.8")}, Level.ERROR, "1 GPU: H100"),
    "disk almost full": ({"disks": [Disk(what="models", path="/m", free_bytes=GIB)]}, Level.WARNING, "Only 1.0 GiB free"),
    "disk full": ({"disks": [Disk(what="models", path="/m", free_bytes=MIB)]}, Level.ERROR, "Only 1.0 MiB free"),
    "disk refused": ({"disks": [Disk(what="models", path="/m", failure="no")]}, Level.ERROR, "is not writable"),
    "port taken": (
        {"ports": [Port(number=8000, purpose="the OpenAI API", option="--port", is_free=False, holder=" by pid 3 (x)")]},
        Level.WARNING, "Port 8000, for the OpenAI API, is in use by pid 3 (x).",
    ),
    "another system": ({"others": {"nats://h:1": 4}}, Level.NOTE, "Another system runs here, on nats://h:1 (4 processes)"),
    "exposed": ({"exposed": ["/k/nkey"]}, Level.WARNING, "Other users can read /k/nkey."),
    "engine refused": (
        {"refused": [Refusal(worker="p1", reason="every layer slides", ago_s=60.0)]},
        Level.WARNING, "The engine of p1 was refused at its last start, 60.0 s ago.",
    ),
    "certificate ended": ({"certificates": [Certificate(path="c", ends_in_s=-1.0)]}, Level.ERROR, "c has expired"),
    "certificate ends": ({"certificates": [Certificate(path="c", ends_in_s=3 * DAY_S)]}, Level.WARNING, "expires in 3 days"),
    "certificate unread": ({"certificates": [Certificate(path="c", failure="no")]}, Level.ERROR, "cannot be read"),
    "unknown": ({"unknown": {"gpus": "it took too long"}}, Level.NOTE, "GPUs could not be checked: it took too long."),
}  # fmt: skip

SYSTEM_FAULTS: dict[str, tuple[dict[str, object], Level, str]] = {
    "no nats": ({"nats": None, "failure": "Nobody listens."}, Level.ERROR, "NATS at nats://127.0.0.1:4222 does not respond"),
    "not let in": ({"failure": "no key"}, Level.ERROR, "cannot connect"),
    "no jetstream": ({"nats": nats(jetstream=False)}, Level.ERROR, "JetStream is off"),
    "old nats": ({"nats": nats(version="2.10.1")}, Level.ERROR, "NATS 2.10.1 is older than 2.11"),
    "small payload": ({"nats": nats(max_payload=65536)}, Level.WARNING, "NATS accepts messages up to 64.0 KiB"),
    "slow nats": ({"nats": nats(rtt_s=0.2)}, Level.WARNING, "NATS takes 200 ms for a round trip"),
    "open nats": (
        {"nats_url": "nats://far:4222", "nats": nats(auth_required=False, tls_required=False)},
        Level.WARNING, "requires no credentials",
    ),
    "nats open to this machine": (
        {"nats": nats(auth_required=False, tls_required=False)}, Level.NOTE, "requires no credentials; it is reached over loopback",
    ),
    "no router": ({"services": [service("orchestrator"), service("collector")]}, Level.ERROR, "No router has reported"),
    "no orchestrator": ({"services": [service("router"), service("collector")]}, Level.ERROR, "No orchestrator has reported"),
    "no collector": ({"services": [service("router"), service("orchestrator")]}, Level.WARNING, "No collector has reported"),
    "starting": (with_service("router", phase=ServicePhase.STARTING, detail="x"), Level.WARNING, "router is starting: x"),
    "remote disk low": (with_service("router", disks=disks(10e9)), Level.WARNING, "for state of router router-1 on h"),
    "remote disk full": (with_service("router", disks=disks(1e9)), Level.ERROR, "for state of router router-1 on h"),
    "failed": (with_service("router", phase=ServicePhase.FAILED, detail="x"), Level.ERROR, "router-1 has failed"),
    "two of a name": (double("router"), Level.ERROR, "Two processes use the name router-1"),
    "no leader": ({"fleet": None}, Level.ERROR, "An orchestrator runs, but none leads"),
    "versions": (with_service("router", version="0.2.0"), Level.WARNING, "0.1.0: collector-1, orchestrator-1; 0.2.0: router-1"),
    "own version": ({"baton": "0.2.0"}, Level.NOTE, "The system runs 0.1.0, this command is 0.2.0"),
    "clock ahead": (skewed(61.0), Level.WARNING, "The clock of h is 61.0 s ahead of ours"),
    "clock behind": (skewed(-3600.0), Level.WARNING, "The clock of h is 3600 s behind ours"),
    "router away": ({"routers": [RouterReply(url="http://far:1", failure="x")]}, Level.NOTE, "cannot be reached from here"),
    "router not ready": (
        {"routers": [RouterReply(url="http://127.0.0.1:1", detail="no worker is ready")]},
        Level.ERROR, "is not ready: no worker is ready",
    ),
    "no keys": (
        {"routers": [RouterReply(url="http://0.0.0.0:1", ready=True, requires_key=False)]},
        Level.WARNING, "http://0.0.0.0:1 requires no API keys.",
    ),
    "no worker": ({"records": [], "loads": [], "fleet": fleet()}, Level.ERROR, "No worker is registered"),
    "none ready": (
        {"records": [record("w1", WorkerPhase.PROBING)], "loads": [HeardLoad(report=load("w1"))], "fleet": fleet()},
        Level.ERROR, "0 of 1 worker ready.",
    ),
    "silent worker": ({"loads": system().loads[:1]}, Level.ERROR, "d1 is registered but has not reported within"),
    "two workers of a name": (reports(HeardLoad(report=load("p1"), is_duplicate=True)), Level.ERROR, "Two processes report as p1"),
    "earlier life": (changed_record(epoch=5), Level.ERROR, "An earlier process of d1 still reports"),
    "unregistered": ({"records": system().records[:1]}, Level.WARNING, "d1 reports its load but is not in the registry"),
    "wire": (changed_record(wire_version=WIRE_VERSION + 1), Level.ERROR, f"d1 uses wire version {WIRE_VERSION + 1}"),
    "no prefix cache": (changed_record(prefix_caching=False), Level.NOTE, "d1 has no prefix cache"),
    "lost": ({"fleet": fleet(living(record("w9"), WorkerPhase.LOST))}, Level.WARNING, "w9 was lost 5.00 s ago"),
    "store lost": (
        {"fleet": fleet(msgspec.structs.replace(living(record("s9", role=Role.STORE), WorkerPhase.LOST), kv_used=0.5))},
        Level.WARNING, "s9 was lost 5.00 s ago, and with its memory KV of 1,600 tokens.",
    ),
    "starts for long": ({"fleet": fleet(living(record("w9"), WorkerPhase.STARTING, 900.0))}, Level.WARNING, "starting for 900 s"),
    "probes for long": ({"fleet": fleet(living(record("w9"), WorkerPhase.PROBING, 90.0))}, Level.WARNING, "probing for 90.0 s"),
    "probes": ({"fleet": fleet(living(record("w9"), WorkerPhase.PROBING))}, Level.NOTE, "w9 has been probing"),
    "its server is away": (
        {"fleet": fleet(living(record("w9", attached=True), WorkerPhase.PROBING))},
        Level.WARNING, "w9 gets no requests: its server has been away for",
    ),
    "drains": ({"fleet": fleet(living(record("w9"), WorkerPhase.DRAINING))}, Level.NOTE, "w9 has been draining"),
    "hardly heard": (
        {"fleet": fleet(msgspec.structs.replace(living(record("w9")), silent_s=8.0))},
        Level.WARNING, "w9 has not reported to the orchestrator for 8.00 s",
    ),
    "only prefill": (only(Role.PREFILL, Role.PREFILL), Level.WARNING, "m has ready workers for prefill only"),
    "only decode": (only(Role.DECODE), Level.WARNING, "m has ready workers for decode only"),
    "two revisions": (two_workers(revision="r2"), Level.NOTE, "m runs in 2 revisions (r: p1; r2: d1)"),
    "fingerprints": (
        two_workers(dtype="bfloat16", kv_layout="HND"),
        Level.ERROR, "p1 and d1 cannot exchange KV: dtype is float32 and bfloat16; kv_layout is NHD and HND.",
    ),
    "adapter on one": (changed_record(adapters=[adapter("sql")]), Level.NOTE, "The adapter sql of m is not loaded on p1"),
    "adapters differ": (adapters_differ(), Level.WARNING, "Workers have different files of the adapter sql"),
    "slow between GPUs": (
        reading(0.52e9), Level.WARNING, "d1 reads KV from p1 at 0.52 GB/s, slow for GPU memory.",
    ),
    "slow between hosts": (
        reading(0.11e9, "cpu"), Level.WARNING, "d1 reads KV from p1 at 0.11 GB/s, slow for host memory.",
    ),
    "remark": (changed_record(note="layers keep more"), Level.NOTE, "d1: layers keep more."),
    "hashing": (
        changed_record(hashing=HashScheme(block_size=16)), Level.WARNING, "Workers of m hash their KV blocks differently",
    ),
    "full": (
        reports(HeardLoad(report=load("p1", kv_tokens_used=99, kv_tokens_total=100, waiting=2))),
        Level.WARNING, "The KV cache of p1 is full (99%) and 2 requests wait",
    ),
    "engine silent": (
        reports(HeardLoad(report=load("p1", engine_silent_s=45.0))),
        Level.WARNING, "The engine of p1 has answered nothing for 45",
    ),
    "loop held": (
        reports(HeardLoad(report=load("p1", loop_late_s=5.0))),
        Level.WARNING, "The event loop of p1 has been held for 5",
    ),
    "store full": (store(100), Level.NOTE, "s1 is full: it stores 100 blocks"),
    "bucket full": (store(object_blocks=7, object_blocks_max=7), Level.NOTE, "s1 is full: it stores 7 blocks"),
    "bucket silent": (store(objects_silent_s=90.0), Level.WARNING, "The object store of s1 has answered no call for"),
    "store loses": (store(damaged_blocks_total=2, unsaved_blocks_total=1), Level.WARNING, "s1 has lost 3 blocks"),
    "copies lost": (copies(30, 20), Level.WARNING, "p1 evicted 30 recently used blocks before a store had them; 20 were copied"),
    "few copies lost": (copies(3, 20), Level.NOTE, "p1 evicted 3 recently used blocks before"),
    "key file": (
        with_service("router", router=RouterHealth(), warning="ROUTER_KEYS_FILE (keys.toml): Invalid value"),
        Level.WARNING, "router-1 cannot use a file: ROUTER_KEYS_FILE (keys.toml): Invalid value",
    ),
    "index degraded": (with_router(RouterHealth(not_exact={"d1": "degraded"})), Level.NOTE, "does not know exactly what d1 has cached"),
    "index fallback": (with_router(RouterHealth(not_exact={"d1": "fallback"})), Level.WARNING, "does not know what d1 has cached"),
    "tokens": (with_router(RouterHealth(tokens_differ=["d1"])), Level.WARNING, "router-1 tokenizes differently from d1"),
    "router's index": (with_router(RouterHealth(is_index_compiled=False)), Level.NOTE, "The prefix index of router-1 runs in Python."),
    "router's placement": (with_router(RouterHealth(is_placement_compiled=False)), Level.NOTE, "The placement of router-1 runs in Python."),
    "router's tokenization": (with_router(RouterHealth(is_tokenization_compiled=False)), Level.NOTE, "The tokenization of router-1 runs in Python."),
    "router's request path": (with_router(RouterHealth(is_request_path_compiled=False)), Level.NOTE, "The request path of router-1 runs in Python."),
    "unknown": ({"unknown": {"fleet": "it took too long"}}, Level.NOTE, "The fleet could not be checked: it took too long."),
}  # fmt: skip


def found(here: InstallationFacts, there: SystemFacts) -> list[Finding]:
    return list(findings(here, there))


def faults(here: InstallationFacts, there: SystemFacts) -> list[Finding]:
    return [one for one in found(here, there) if one.level is not Level.OK]


def test_the_cost_of_placement_in_python_and_its_cure_are_told():
    (only_one,) = faults(installation(is_placement_compiled=False), system())
    (other,) = faults(installation(is_index_compiled=False), system())

    assert "14 ms with 1,000" in only_one.why
    assert "C compiler" in only_one.todo
    assert "1,000" not in other.why


def test_an_old_refusal_is_no_finding():
    old = Refusal(worker="p1", reason="every layer slides", ago_s=2 * DAY_S)

    assert faults(installation(refused=[old]), system()) == []


def test_a_healthy_system_has_no_faults():
    result = examination(found(installation(), system()), is_running=True)

    assert faults(installation(), system()) == []
    assert result.summary == "The system is healthy."


@pytest.mark.parametrize("fault", INSTALLATION_FAULTS)
def test_a_fault_of_the_installation_is_the_only_finding(fault: str):
    changes, level, text = INSTALLATION_FAULTS[fault]

    (only_one,) = faults(installation(**changes), system())

    assert only_one.level is level
    assert text in only_one.what
    assert level is Level.NOTE or only_one.todo


@pytest.mark.parametrize("fault", SYSTEM_FAULTS)
def test_a_fault_of_the_system_is_the_worst_finding(fault: str):
    changes, level, text = SYSTEM_FAULTS[fault]

    worse = [Level.OK, Level.NOTE, Level.WARNING, Level.ERROR].index
    all_of_them = faults(installation(), system(**changes))
    (it,) = [one for one in all_of_them if text in one.what]

    assert it.level is level
    assert max(worse(one.level) for one in all_of_them) == worse(level)
    assert level is Level.NOTE or it.why
    assert level is not Level.WARNING or it.todo or it.why


def test_lost_workers_are_named_when_none_is_left():
    lost = fleet(living(record("w9"), WorkerPhase.LOST))
    told = [one.what for one in faults(installation(), system(records=[], loads=[], fleet=lost))]

    assert told == ["No worker is registered.", "w9 was lost 5.00 s ago."]


@pytest.mark.parametrize(
    ("notice_s", "bus_s", "told"),
    [
        (0.0016, 0.0042, ["grants of KV come first as NIXL notifications: d1 from p1 in 1.6 ms (over the bus 4.2 ms)"]),
        (0.0016, 0.0018, ["grants of KV take the bus alone: d1 from p1 in 1.8 ms (as notifications 1.6 ms)"]),
        (0.0, 0.0018, []),
        (0.0, 0.0, []),
    ],
)
def test_the_way_of_grants_is_told_with_both_times(notice_s, bus_s, told):
    read = KvReadSpeed(
        source_id=WorkerId("p1"), bytes_per_s=10**10, memory=KvMemory.CPU, notice_s=notice_s, bus_s=bus_s
    )

    findings = found(installation(), system(**changed_record(kv_reads=[read])))

    assert [one.what for one in findings if one.what.startswith("grants of KV")] == told


@pytest.mark.parametrize(("speed", "memory"), [(42e9, "cuda"), (1.5e9, "cpu")])
def test_the_speed_of_kv_reads_is_told(speed, memory):
    there = system(**reading(speed, memory))

    assert faults(installation(), there) == []
    assert f"KV self-tests read d1 from p1 at {speed / 1e9:.2g} GB/s" in [
        one.what for one in found(installation(), there)
    ]


@pytest.mark.parametrize(("speed", "told"), [(1.5e9, "at 1.5 GB/s (UCX cma/memory)"), (1e8, "over UCX cma/memory at")])
def test_what_moved_the_kv_is_told_with_its_speed(speed: float, told: str):
    there = system(**reading(speed, "cpu", way="UCX cma/memory"))

    assert any(told in one.what for one in found(installation(), there))


def test_workers_with_different_plug_ins_are_told_what_to_change():
    one, two = system().records
    other = msgspec.structs.replace(two.fingerprint, connector="baton-2/nixl-1.5.1/LIBFABRIC")
    (it,) = faults(installation(), system(records=[one, msgspec.structs.replace(two, fingerprint=other)]))

    assert "cannot exchange KV: connector is" in it.what
    assert it.todo.endswith("give both workers the same WORKER_KV_BACKEND.")


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"listens": []}, Level.OK, "KV transfer of 1 worker listens on loopback only"),
        (
            {"listens": ["10.0.0.2", "10.0.0.3"]},
            Level.NOTE,
            "d1 can be reached by others: KV transfer listens on 10.0.0.2",
        ),
        ({"listens": ["10.0.0.2"], "attached": True}, None, "listens on"),
        ({}, None, "listens on"),
    ],
    ids=["loopback", "network", "attached", "not known"],
)
def test_it_says_whether_others_can_reach_kv_transfer(changes: dict[str, object], level: Level | None, text: str):
    told = {one.what: one for one in found(installation(), system(**changed_record(**changes)))}

    assert [one.level for what, one in told.items() if text in what] == ([level] if level else [])
    assert all(
        "network of its own" in one.todo for one in told.values() if one.level is Level.NOTE and text in one.what
    )


def test_a_speed_of_a_worker_that_has_left_is_not_told():
    there = system(**reading(1e6, source="p9"))

    assert faults(installation(), there) == []


def test_the_alert_and_the_doctor_call_the_same_reads_slow():
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    (alert,) = [rule["expr"] for rule in rules if rule["alert"] == "KvReadsSlow"]

    limits = {memory: float(limit) for memory, limit in re.findall(r'memory="(\w+)"} < ([0-9e]+)', alert)}

    assert limits == SLOW_BYTES_PER_S


def test_more_ranks_than_cores_are_a_fault_where_engines_with_several_share_them():
    def there(*ranks: int, host: str = "h") -> SystemFacts:
        engines = [
            msgspec.structs.replace(record(name, role=role), engine="vllm", ranks=count, host=host)
            for (name, role), count in zip({"p1": Role.PREFILL, "d1": Role.DECODE}.items(), ranks, strict=True)
        ]
        return system(records=engines, fleet=fleet(*map(living, engines)))

    (it,) = faults(installation(cores=2), there(1, 2))

    assert it.level is Level.WARNING
    assert it.what == "The engines on this machine have 3 ranks, but there are 2 cores."
    assert "a core of its own" in it.todo
    for here, fits in (
        (installation(cores=3), there(1, 2)),
        (installation(cores=1), there(1, 1)),
        (installation(cores=2, gpus=[GPU]), there(1, 2)),
        (installation(cores=2), there(1, 2, host="another")),
    ):
        assert not [one for one in faults(here, fits) if "ranks" in one.what]


def test_without_a_system_only_the_installation_is_checked():
    nothing = SystemFacts(nats_url="nats://127.0.0.1:4222", failure="Nobody listens.")

    result = examination(found(installation(), nothing), is_running=nothing.is_running)

    assert {one.area.value for one in result.findings} == {"Installation", "This machine"}
    assert result.summary == "The installation is healthy. No system runs; `baton up` starts one."
    joined = examination(found(installation(), nothing), is_running=nothing.is_running, joined=["two"])
    assert joined.summary.endswith("has joined as two: `baton doctor` on the head host examines the system.")


def test_without_a_system_a_missing_nats_server_is_a_warning():
    (it,) = faults(installation(nats_server=""), SystemFacts())

    assert it.level is Level.WARNING
    assert "--nats-url" in it.todo


@pytest.mark.parametrize(
    ("ours", "theirs", "what", "todo"),
    [
        (
            {"options": "config=a unit=32 block=544 states=b"},
            {"options": "config=a unit=96 block=1056 states=b"},
            "options is unit=32 block=544 and unit=96 block=1056.",
            "the same --block-size and --prefix-match-unit.",
        ),
        ({"block_size": 16}, {"block_size": 32}, "block_size is 16 and 32.", "the same --block-size."),
        (
            {"options": "config=a hybrid_manager_off=b"},
            {"options": "config=a"},
            "options is hybrid_manager_off=b and none.",
            "the same --disable-hybrid-kv-cache-manager",
        ),
    ],
)
def test_engines_whose_prefixes_never_meet_are_told_which_settings_must_be_equal(ours, theirs, what, todo):
    both = system(**two_workers(**theirs)).records
    first = msgspec.structs.replace(both[0], fingerprint=msgspec.structs.replace(FINGERPRINT, **ours))

    (it,) = (one for one in faults(installation(), system(records=[first, both[1]])) if "cannot exchange" in one.what)

    assert it.what == f"p1 and d1 cannot exchange KV: {what}"
    assert todo in it.todo


def test_beside_a_matching_pair_a_third_fingerprint_is_a_warning():
    third = record("w3")
    other = msgspec.structs.replace(third, fingerprint=msgspec.structs.replace(FINGERPRINT, dtype="x"))
    changes = {"records": [*system().records, other], "loads": [*system().loads, HeardLoad(report=load("w3"))]}

    (it,) = faults(installation(), system(**changes))

    assert (it.level, it.what) == (Level.WARNING, "d1, p1 and w3 cannot exchange KV: dtype is float32 and x.")


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_output_fits_the_terminal_and_is_complete(columns: int, encoding: str):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    there = system(**two_workers(dtype="bfloat16"))
    result = examination(found(installation(is_index_compiled=False), there), is_running=True)

    draw(result, Console(file=out, width=columns, no_color=True))
    out.flush()

    lines = raw.getvalue().decode(encoding).split("\n")
    assert max(map(len, lines)) <= columns
    assert not [line for line in lines if line != line.rstrip()]
    joined = " ".join(" ".join(lines).split())
    for finding in result.findings:
        assert finding.what in joined
        assert finding.todo in joined
    assert joined.endswith("The system is unhealthy: 1 error, 1 warning.")


ANY_CHANGES = st.dictionaries(
    st.sampled_from(list(SYSTEM_FAULTS)), st.none(), max_size=4
).map(lambda chosen: {key: value for name in chosen for key, value in SYSTEM_FAULTS[name][0].items()})  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(changes=ANY_CHANGES, left_out=st.sets(st.sampled_from(sorted(system().__struct_fields__))))
def test_any_combination_of_faults_gives_findings(changes: dict[str, object], left_out: set[str]):
    known = {name: getattr(system(**changes), name) for name in SystemFacts.__struct_fields__ if name not in left_out}

    result = examination(found(InstallationFacts(), SystemFacts(**known)), is_running=True)

    assert result.errors == sum(one.level is Level.ERROR for one in result.findings)
    assert all(one.what for one in result.findings)


def test_services_of_old_versions_give_findings():
    assert found(InstallationFacts(), SystemFacts(nats=Nats(), nats_url="x"))
