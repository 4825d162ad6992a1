"""Which processes `baton up` starts, and with which settings."""

from __future__ import annotations

import msgspec
import pytest

from services.launcher.system.plan import OPEN, Machine, PlanRefused, Stage, SystemPlan, UpOptions, plan_system

OPTIONS = UpOptions(prefill=1, decode=1, state_dir="/state")
MACHINE = Machine(python="python", nats_server="/bin/nats-server", cores=(0, 1))


def plan(**changes: object) -> SystemPlan:
    return plan_system(msgspec.structs.replace(OPTIONS, **changes), MACHINE)


def worker_env(system: SystemPlan, name: str, variable: str) -> str:
    return next(p for p in system.processes if p.name == name).env.get(variable, "")


def test_the_default_system_has_nats_three_services_and_two_workers():
    names = [process.name for process in plan().processes]

    assert names == ["nats", "orchestrator", "collector", "router", "prefill-1", "decode-1"]


def test_every_process_gets_the_nats_url():
    system = plan(nats_port=4333)

    assert {p.env["BATON_NATS_URL"] for p in system.processes if p.stage is not Stage.NATS} == {"nats://127.0.0.1:4333"}


def test_two_workers_on_two_cores_get_one_core_each():
    system = plan()

    assert [worker_env(system, name, "WORKER_CPU_CORES") for name in ("prefill-1", "decode-1")] == ["0", "1"]
    assert system.notes == (OPEN,)


def test_more_workers_than_cores_share_them_with_a_warning():
    system = plan(decode=3)

    assert [worker_env(system, f"decode-{n}", "WORKER_CPU_CORES") for n in (1, 2, 3)] == ["1", "0", "1"]
    assert system.notes == ("4 engines share 2 CPU cores, so each is slower.", OPEN)


def test_a_large_machine_reserves_a_core_for_the_services():
    system = plan_system(OPTIONS, msgspec.structs.replace(MACHINE, cores=tuple(range(8))))

    assert worker_env(system, "prefill-1", "WORKER_CPU_CORES") == "1,2,3,4"
    assert worker_env(system, "decode-1", "WORKER_CPU_CORES") == "5,6,7"


def test_workers_get_separate_gpus_while_there_are_enough():
    system = plan_system(OPTIONS, msgspec.structs.replace(MACHINE, gpus=("0", "1")))

    assert [worker_env(system, n, "CUDA_VISIBLE_DEVICES") for n in ("prefill-1", "decode-1")] == ["0", "1"]
    assert worker_env(system, "decode-1", "WORKER_ENGINE_ARGS") == ""


def test_the_connector_option_overrides_the_workers_default():
    options = msgspec.structs.replace(OPTIONS, connector="upstream")

    assert {worker.env.get("WORKER_CONNECTOR") for worker in plan_system(OPTIONS, MACHINE).stage(Stage.WORKERS)} == {
        None
    }
    assert {worker.env["WORKER_CONNECTOR"] for worker in plan_system(options, MACHINE).stage(Stage.WORKERS)} == {
        "upstream"
    }


def test_workers_that_share_a_gpu_share_its_memory_too():
    options = msgspec.structs.replace(OPTIONS, engine_args="--max-num-seqs 8")

    system = plan_system(options, msgspec.structs.replace(MACHINE, gpus=("0",)))

    assert worker_env(system, "decode-1", "CUDA_VISIBLE_DEVICES") == "0"
    assert worker_env(system, "decode-1", "WORKER_ENGINE_ARGS") == "--gpu-memory-utilization 0.45 --max-num-seqs 8"
    assert len(system.notes) == 2


def test_simulated_engines_take_no_cores():
    assert worker_env(plan(engine="simulated"), "decode-1", "WORKER_CPU_CORES") == ""


def test_a_joining_worker_takes_a_free_name():
    options = msgspec.structs.replace(OPTIONS, prefill=0, decode=2, join=True)

    system = plan_system(options, MACHINE, names_taken=["prefill-1", "decode-1", "decode-3"])

    assert [process.name for process in system.processes] == ["decode-2", "decode-4"]
    assert system.ports == ()


def test_scaling_sets_the_planners_limits_and_divides_devices_for_the_maximum():
    machine = msgspec.structs.replace(MACHINE, gpus=("0", "1"))
    system = plan_system(msgspec.structs.replace(OPTIONS, workers_min=2, workers_max=4), machine)

    planner = {"ORCHESTRATOR_PLANNER": "act", "ORCHESTRATOR_PLANNER_WORKERS_MIN": "2"}
    planner |= {"ORCHESTRATOR_PLANNER_WORKERS_MAX": "4"}
    told = next(process for process in system.processes if process.name == "orchestrator").env
    assert planner.items() <= told.items()
    assert len(system.stage(Stage.WORKERS)) == 2
    assert worker_env(system, "prefill-1", "WORKER_ENGINE_ARGS") == "--gpu-memory-utilization 0.45"


def test_without_scaling_the_planners_settings_are_untouched():
    told = next(process for process in plan().processes if process.name == "orchestrator").env

    assert not [name for name in told if name.startswith("ORCHESTRATOR_")]


def test_a_running_nats_is_not_started_again():
    system = plan(nats_url="nats://elsewhere:4222")

    assert not system.stage(Stage.NATS)
    assert [port.option for port in system.ports] == ["--port", "--collector-port"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prefill": 0, "decode": 0}, "at least one"),
        ({"decode": 0}, "Add --decode 1 or --both 1"),
        ({"prefill": 0}, "Add --prefill 1 or --both 1"),
        ({"workers_max": 1}, "2 workers are not between --workers-min 1 and --workers-max 1"),
        ({"workers_min": 3, "workers_max": 4}, "2 workers are not between"),
        ({"join": True, "workers_max": 4}, "--workers-max is for a new system"),
    ],
)
def test_a_fleet_that_cannot_serve_is_rejected_with_advice(changes: dict[str, int], text: str):
    with pytest.raises(PlanRefused, match=text):
        plan(**changes)


def test_a_missing_nats_server_is_reported_with_a_remedy():
    with pytest.raises(PlanRefused, match="BATON_NATS_SERVER"):
        plan_system(OPTIONS, msgspec.structs.replace(MACHINE, nats_server=""))


def test_stores_start_last_and_use_no_engine_cores():
    system = plan(store=2)

    assert [p.name for p in system.stage(Stage.WORKERS)] == ["prefill-1", "decode-1", "store-1", "store-2"]
    assert [worker_env(system, name, "WORKER_CPU_CORES") for name in ("prefill-1", "decode-1", "store-1")] == [
        "0",
        "1",
        "",
    ]
    assert worker_env(system, "store-1", "WORKER_ROLE") == "store"


def test_a_store_can_join_but_not_start_a_system():
    joined = plan_system(UpOptions(store=1, join=True, nats_url="nats://n", state_dir="/state"), MACHINE, ["store-1"])

    assert [process.name for process in joined.processes] == ["store-2"]
    with pytest.raises(PlanRefused, match="at least one with --prefill"):
        plan(prefill=0, decode=0, store=1)
    with pytest.raises(PlanRefused, match="--connector upstream"):
        plan(store=1, connector="upstream")


def test_a_running_store_takes_no_core_from_a_joining_engine():
    joined = plan_system(
        UpOptions(decode=1, join=True, nats_url="nats://n", state_dir="/state"), MACHINE, ["prefill-1", "store-1"]
    )

    assert worker_env(joined, "decode-1", "WORKER_CPU_CORES") == "1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "gpu-host"])
def test_a_reachable_system_needs_keys_or_an_explicit_insecure(host):
    with pytest.raises(PlanRefused, match=r"baton keys new .*--insecure"):
        plan(host=host)
    assert {p.env.get("ROUTER_INSECURE") for p in plan(host=host, insecure=True).processes if p.name == "router"} == {
        "true"
    }
    assert plan(host=host, access_configured=True).processes


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_a_loopback_system_needs_no_keys(host):
    assert not any("ROUTER_INSECURE" in process.env for process in plan(host=host).processes)


def test_the_console_stays_on_loopback_unless_it_is_asked_elsewhere():
    def host_of(system):
        return next(process for process in system.processes if process.name == "collector").env["COLLECTOR_HOST"]

    assert host_of(plan(host="0.0.0.0", access_configured=True)) == "127.0.0.1"
    assert host_of(plan(collector_host="0.0.0.0", access_configured=True)) == "0.0.0.0"
    with pytest.raises(PlanRefused, match="--collector-host"):
        plan(collector_host="0.0.0.0")
