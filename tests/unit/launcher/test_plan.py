"""Which processes `baton up` starts, and with which settings."""

from __future__ import annotations

import json

import msgspec
import pytest

from services.launcher.system.options import ModelOptions, UpOptions
from services.launcher.system.plan import OPEN, plan_system
from services.launcher.system.process_plan import Machine, PlanRefused, Stage, SystemPlan

MODEL = ModelOptions(prefill=1, decode=1)
MACHINE = Machine(python="python", nats_server="/bin/nats-server", cores=(0, 1))
A, B = ModelOptions(model="A", prefill=1, decode=1), ModelOptions(model="B", both=1)


def options_of(**changes: object) -> UpOptions:
    """Of one model: each change is its own or the system's."""
    own = {name: changes.pop(name) for name in list(changes) if name in ModelOptions.__struct_fields__}
    return UpOptions(models=(msgspec.structs.replace(MODEL, **own),), state_dir="/state", **changes)


def plan(**changes: object) -> SystemPlan:
    return plan_system(options_of(**changes), MACHINE)


def worker_env(system: SystemPlan, name: str, variable: str) -> str:
    return next(p for p in system.processes if p.name == name).env.get(variable, "")


def test_the_default_system_has_nats_three_services_and_two_workers():
    names = [process.name for process in plan().processes]

    assert names == ["nats", "orchestrator", "collector", "router", "prefill-1", "decode-1"]


def test_every_process_gets_the_nats_url():
    system = plan(nats_port=4333)

    assert {p.env["BATON_NATS_URL"] for p in system.processes if p.stage is not Stage.NATS} == {"nats://127.0.0.1:4333"}


ON_GPUS = msgspec.structs.replace(MACHINE, gpus=tuple("01234567"))
PARALLEL = ("WORKER_TENSOR_PARALLEL_SIZE", "WORKER_PIPELINE_PARALLEL_SIZE", "CUDA_VISIBLE_DEVICES")


def parallel_of(system: SystemPlan, name: str) -> list[str]:
    return [worker_env(system, name, variable) for variable in PARALLEL]


def test_the_gpus_of_a_worker_are_shared_out_over_its_stages():
    system = plan_system(options_of(gpus_per_prefill=4, pipeline_prefill=2, pipeline_decode=3), ON_GPUS)

    assert parallel_of(system, "prefill-1") == ["2", "2", "0,1,2,3"]
    assert parallel_of(system, "decode-1") == ["1", "3", "4,5,6"]


def test_ranks_on_a_cpu_are_shared_out_over_stages():
    system = plan_system(options_of(prefill=0, decode=0, both=1, pipeline=2), MACHINE)

    assert parallel_of(system, "both-1") == ["1", "2", ""]
    assert worker_env(system, "both-1", "WORKER_CPU_CORES") == "0,1"


def test_the_workers_of_a_data_parallel_group_know_their_places():
    system = plan_system(options_of(prefill=1, decode=2, data_parallel_decode=2, gpus_per_prefill=2), ON_GPUS)

    places = [
        (
            each.name,
            each.group,
            *(each.env.get(f"WORKER_DATA_PARALLEL_{name}", "") for name in ("SIZE", "RANK", "GROUP")),
        )
        for each in system.stage(Stage.WORKERS)
    ]
    assert places == [
        ("prefill-1", "", "", "", ""),
        ("decode-1", "decode-1", "2", "0", "decode-1"),
        ("decode-2", "decode-1", "2", "1", "decode-1"),
        ("decode-3", "decode-3", "2", "0", "decode-3"),
        ("decode-4", "decode-3", "2", "1", "decode-3"),
    ]
    gpus = [worker_env(system, f"decode-{number}", "CUDA_VISIBLE_DEVICES") for number in range(1, 5)]
    assert len(set(gpus)) == 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpus_per_prefill": 3, "pipeline_prefill": 2}, "3 GPUs of a prefill worker cannot be shared out over 2"),
        ({"pipeline": 2, "engine": "simulated"}, "Simulated engines have no ranks"),
        ({"engine_args": "--pipeline-parallel-size 2"}, "use --gpus-per-worker N, --pipeline N"),
        ({"engine_args": "--data-parallel-hybrid-lb"}, "--data-parallel N"),
        ({"engine_args": "-dp 2"}, "--data-parallel N"),
        ({"data_parallel": 2, "engine": "simulated"}, "no experts to share out"),
        ({"data_parallel_decode": 2, "connector": "upstream"}, "needs the KV exchange"),
        ({"data_parallel": 2, "model": "m", "sleep_after_s": 60.0}, "do not sleep"),
        ({"data_parallel": 2, "workers_max": 8}, "single workers"),
    ],
)
def test_stages_that_cannot_be_are_refused_with_the_option_to_use(changes: dict[str, object], why: str):
    with pytest.raises(PlanRefused, match=why):
        plan_system(options_of(**changes), ON_GPUS)


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (15, "1"), (16, "2"), (128, "16")])
def test_nats_leaves_the_cores_to_the_engines(cores: int, threads: str):
    system = plan_system(options_of(), msgspec.structs.replace(MACHINE, cores=tuple(range(cores))))

    assert [p.env for p in system.processes if p.name == "nats"] == [{"GOMAXPROCS": threads}]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_system_that_keeps_trying_depends_on_no_single_worker(keeps: bool):
    system = plan(keep_trying=keeps)

    for process in system.processes:
        is_worker = process.stage is Stage.WORKERS
        assert (process.keeps_trying, process.is_extra) == (keeps and is_worker, keeps and is_worker)


def test_two_workers_on_two_cores_get_one_core_each():
    system = plan()

    assert [worker_env(system, name, "WORKER_CPU_CORES") for name in ("prefill-1", "decode-1")] == ["0", "1"]
    assert system.notes == (OPEN,)


def test_more_workers_than_cores_share_them_with_a_warning():
    system = plan(decode=3)

    assert [worker_env(system, f"decode-{n}", "WORKER_CPU_CORES") for n in (1, 2, 3)] == ["1", "0", "1"]
    assert system.notes == ("4 engines share 2 CPU cores, so each is slower.", OPEN)


def test_a_large_machine_reserves_a_core_for_the_services():
    system = plan_system(options_of(), msgspec.structs.replace(MACHINE, cores=tuple(range(8))))

    assert worker_env(system, "prefill-1", "WORKER_CPU_CORES") == "1,2,3,4"
    assert worker_env(system, "decode-1", "WORKER_CPU_CORES") == "5,6,7"


def test_workers_get_separate_gpus_while_there_are_enough():
    system = plan_system(options_of(), msgspec.structs.replace(MACHINE, gpus=("0", "1")))

    assert [worker_env(system, n, "CUDA_VISIBLE_DEVICES") for n in ("prefill-1", "decode-1")] == ["0", "1"]
    assert worker_env(system, "decode-1", "WORKER_ENGINE_ARGS") == ""


def test_prefill_and_decode_workers_may_have_different_numbers_of_gpus():
    machine = msgspec.structs.replace(MACHINE, gpus=("0", "1", "2"))
    system = plan_system(options_of(gpus_per_decode=2), machine)

    assert [worker_env(system, n, "CUDA_VISIBLE_DEVICES") for n in ("prefill-1", "decode-1")] == ["2", "0,1"]
    ranks = [worker_env(system, n, "WORKER_TENSOR_PARALLEL_SIZE") for n in ("prefill-1", "decode-1")]
    assert ranks == ["", "2"]


def test_the_connector_option_overrides_the_workers_default():
    options = options_of(connector="upstream")

    assert {
        worker.env.get("WORKER_CONNECTOR") for worker in plan_system(options_of(), MACHINE).stage(Stage.WORKERS)
    } == {None}
    assert {worker.env["WORKER_CONNECTOR"] for worker in plan_system(options, MACHINE).stage(Stage.WORKERS)} == {
        "upstream"
    }


def test_all_workers_of_a_model_move_kv_by_one_plug_in():
    workers = [*plan(kv_backend="LIBFABRIC", store=1).stage(Stage.WORKERS)]

    assert [worker.env["WORKER_KV_BACKEND"] for worker in workers] == ["LIBFABRIC"] * 3
    assert all("WORKER_KV_BACKEND" not in worker.env for worker in plan().stage(Stage.WORKERS))


def test_workers_that_share_a_gpu_share_its_memory_too():
    options = options_of(engine_args="--max-num-seqs 8")

    system = plan_system(options, msgspec.structs.replace(MACHINE, gpus=("0",)))

    assert worker_env(system, "decode-1", "CUDA_VISIBLE_DEVICES") == "0"
    assert worker_env(system, "decode-1", "WORKER_ENGINE_ARGS") == "--gpu-memory-utilization 0.45 --max-num-seqs 8"
    assert len(system.notes) == 2


def test_simulated_engines_take_no_cores():
    assert worker_env(plan(engine="simulated"), "decode-1", "WORKER_CPU_CORES") == ""


def test_a_joining_worker_takes_a_free_name():
    options = options_of(prefill=0, decode=2, join=True)

    system = plan_system(options, MACHINE, names_taken=["prefill-1", "decode-1", "decode-3"])

    assert [process.name for process in system.processes] == ["decode-2", "decode-4"]
    assert system.ports == ()


def test_scaling_sets_the_planners_limits_and_divides_devices_for_the_maximum():
    machine = msgspec.structs.replace(MACHINE, gpus=("0", "1"))
    system = plan_system(options_of(workers_min=2, workers_max=4), machine)

    told = next(process for process in system.processes if process.name == "orchestrator").env
    assert told["ORCHESTRATOR_PLANNER"] == "act"
    assert json.loads(told["ORCHESTRATOR_PLANNER_MODELS"]) == {"*": {"workers_min": 2, "workers_max": 4}}
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
        ({"engine_args": "--max-num-seqs 8 -tp 2"}, "use --gpus-per-worker N"),
        ({"engine_args": "--tensor-parallel-size=2"}, "use --gpus-per-worker N"),
        ({"gpus_per_decode": 2, "engine": "simulated"}, "Simulated engines have no ranks"),
        ({"gpus_per_decode": 2, "workers_max": 4}, "--workers-max starts workers of one size"),
        ({"gpus_per_worker": 3}, "with 3 ranks needs as many cores"),
    ],
)
def test_a_fleet_that_cannot_serve_is_rejected_with_advice(changes: dict[str, int], text: str):
    with pytest.raises(PlanRefused, match=text):
        plan(**changes)


def test_a_missing_nats_server_is_reported_with_a_remedy():
    with pytest.raises(PlanRefused, match="BATON_NATS_SERVER"):
        plan_system(options_of(), msgspec.structs.replace(MACHINE, nats_server=""))


def test_stores_start_last_and_use_no_engine_cores():
    system = plan(store=2)

    assert [p.name for p in system.stage(Stage.WORKERS)] == ["prefill-1", "decode-1", "store-1", "store-2"]
    assert [worker_env(system, name, "WORKER_CPU_CORES") for name in ("prefill-1", "decode-1", "store-1")] == [
        "0",
        "1",
        "",
    ]
    assert worker_env(system, "store-1", "WORKER_ROLE") == "store"


def test_stores_share_out_the_memory_that_a_host_gives_them():
    shared_out = plan(store=2, host_memory_bytes=6 << 30)

    name = "WORKER_STORE_MEMORY_BYTES"
    assert [worker_env(shared_out, each, name) for each in ("store-1", "store-2")] == [str(3 << 30)] * 2
    assert worker_env(shared_out, "prefill-1", name) == worker_env(plan(store=1), "store-1", name) == ""


def test_stores_keep_objects_in_the_bucket_that_they_are_given():
    planned = plan(store=2, object_store="http://h/b")

    urls = [worker_env(planned, each, "WORKER_STORE_OBJECTS_URL") for each in ("store-1", "store-2", "decode-1")]
    assert urls == ["http://h/b", "http://h/b", ""]


def test_a_store_can_join_but_not_start_a_system():
    joined = plan_system(options_of(prefill=0, decode=0, store=1, join=True, nats_url="nats://n"), MACHINE, ["store-1"])

    assert [process.name for process in joined.processes] == ["store-2"]
    with pytest.raises(PlanRefused, match="at least one with --prefill"):
        plan(prefill=0, decode=0, store=1)
    with pytest.raises(PlanRefused, match="--connector upstream"):
        plan(store=1, connector="upstream")


def test_a_running_store_takes_no_core_from_a_joining_engine():
    joined = plan_system(options_of(prefill=0, join=True, nats_url="nats://n"), MACHINE, ["prefill-1", "store-1"])

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


def several(*models: ModelOptions, machine: Machine = MACHINE, **changes: object) -> SystemPlan:
    return plan_system(UpOptions(models=models, state_dir="/state", **changes), machine)


def test_each_model_has_its_own_workers_and_settings():
    system = several(A, msgspec.structs.replace(B, engine_args="--max-num-seqs 8", store=1))

    workers = system.stage(Stage.WORKERS)
    assert [(each.name, each.env["WORKER_MODEL"], each.model) for each in workers] == [
        ("prefill-1", "A", 0),
        ("decode-1", "A", 0),
        ("both-1", "B", 1),
        ("store-1", "B", 1),
    ]
    assert [each.env.get("WORKER_ENGINE_ARGS", "") for each in workers] == ["", "", *["--max-num-seqs 8"] * 2]
    assert [each.note.partition(",")[0] for each in workers] == ["A", "A", "B", "B"]


def test_workers_are_told_their_models_aliases():
    system = several(A, msgspec.structs.replace(B, aliases=("chat", "fast")))

    assert [worker_env(system, name, "WORKER_ALIASES") for name in ("prefill-1", "both-1")] == ["", "chat,fast"]


def test_with_one_model_awake_each_has_the_whole_machine_and_the_others_start_asleep():
    system = several(A, msgspec.structs.replace(B, store=1), awake_max=1)

    assert [worker_env(system, name, "WORKER_CPU_CORES") for name in ("prefill-1", "decode-1", "both-1")] == [
        "0",
        "1",
        "0,1",
    ]
    names = ("prefill-1", "decode-1", "both-1", "store-1")
    assert [worker_env(system, name, "WORKER_ASLEEP") for name in names] == ["", "", "true", ""]


def test_the_orchestrator_gets_the_bounds_of_sleep():
    system = several(A, msgspec.structs.replace(B, sleep_after_s=600.0), awake_max=1)

    told = next(each for each in system.processes if each.name == "orchestrator").env
    assert json.loads(told["ORCHESTRATOR_SLEEP_AFTER_S"]) == {"B": 600.0}
    assert told["ORCHESTRATOR_AWAKE_MAX"] == "1"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sleep_after_s": 5.0}, "--sleep-after needs the model's name"),
        ({"awake_max": 1}, "--awake-max 1 changes nothing: there are 1 models"),
        ({"join": True, "model": "A", "sleep_after_s": 5.0}, "--sleep-after is for a new system"),
    ],
)
def test_bounds_of_sleep_that_mean_nothing_are_refused(options: dict[str, object], text: str):
    with pytest.raises(PlanRefused, match=text):
        plan(**options)


def test_models_divide_the_machine_for_all_workers_that_may_run():
    eight = msgspec.structs.replace(MACHINE, gpus=tuple("01234567"))
    system = several(msgspec.structs.replace(A, workers_max=6), B, machine=eight)

    gpus = [worker_env(system, name, "CUDA_VISIBLE_DEVICES") for name in ("prefill-1", "decode-1", "both-1")]
    assert gpus == ["0", "1", "6"]


def test_the_planner_gets_each_models_limits():
    told = next(p for p in several(msgspec.structs.replace(A, workers_max=4), B).processes if p.name == "orchestrator")

    assert json.loads(told.env["ORCHESTRATOR_PLANNER_MODELS"]) == {
        "A": {"workers_min": 1, "workers_max": 4},
        "B": {"workers_min": 1, "workers_max": 1},
    }
    assert told.env["ORCHESTRATOR_PLANNER"] == "act"


@pytest.mark.parametrize(
    ("models", "text"),
    [
        ((A, msgspec.structs.replace(B, both=0)), "No workers for B"),
        ((A, msgspec.structs.replace(B, both=0, decode=1)), "Only --decode workers for B: none would prefill"),
        ((A, msgspec.structs.replace(B, workers_min=2, workers_max=2)), "1 workers for B are not between"),
        ((A, A), "--model A is given twice"),
        ((A, msgspec.structs.replace(B, aliases=("A",))), "--alias A: another model has this name"),
        ((A, msgspec.structs.replace(B, aliases=("-x",))), "--alias -x: write up to 128 letters"),
        (tuple(msgspec.structs.replace(each, aliases=("chat",)) for each in (A, B)), "--alias chat: another model"),
        ((A, msgspec.structs.replace(B, model="")), "--model is empty"),
    ],
)
def test_each_model_is_checked_by_itself(models: tuple[ModelOptions, ...], text: str):
    with pytest.raises(PlanRefused, match=text):
        several(*models)


def test_each_attached_server_gets_a_worker_of_its_own_without_an_engine():
    system = plan(prefill=0, decode=0, attach=("http://h:1/v1=theirs", "https://cloud"), attach_key_file="/key")

    names = [process.name for process in system.processes if process.stage is Stage.WORKERS]
    variables = ("ENGINE", "ROLE", "ATTACH_URL", "ATTACH_MODEL", "ATTACH_KEY_FILE")
    first, second = ([worker_env(system, name, f"WORKER_{one}") for one in variables] for name in names)
    assert names == ["attached-1", "attached-2"]
    assert first == ["attached", "both", "http://h:1/v1", "theirs", "/key"]
    assert second == ["attached", "both", "https://cloud", "", "/key"]


def test_engines_and_attached_servers_of_one_model_stand_side_by_side():
    system = plan(model="A", attach=("http://h:1",))

    engines = {p.name: p.env["WORKER_ENGINE"] for p in system.processes if p.stage is Stage.WORKERS}
    assert engines == {"prefill-1": "vllm", "decode-1": "vllm", "attached-1": "attached"}
    assert [worker_env(system, name, "WORKER_CPU_CORES") for name in engines] == ["0", "1", ""]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attach": ("h:1",)}, "write it as http://"),
        ({"attach_key_file": "/key"}, "give the server with --attach URL"),
        ({"attach": ("http://h",), "sleep_after_s": 5.0, "model": "A"}, "leave out --sleep-after"),
    ],
)
def test_a_server_that_cannot_be_attached_is_refused_before_anything_starts(changes, why):
    with pytest.raises(PlanRefused, match=why):
        plan(**changes)
