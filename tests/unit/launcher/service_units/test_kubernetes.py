"""The values of a fleet file for the chart, and the folder that `baton init --kubernetes` writes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.launcher.fleet.fleet_file import WrongFleetFile, read_fleet_file
from services.launcher.service_files.files import CannotWriteService
from services.launcher.service_files.kubernetes import still_to_do, values_of, write_chart
from tests.support.processes import ROOT
from tests.support.system import baton

CHART = ROOT / "services/launcher/service_files/chart"
FLEET = """
router = { port = 8080, count = 3 }
collector = { port = 8081 }
[env]
ROUTER_WAKE_S_MAX = 30
WORKER_LEGS_MAX = 7
[[model]]
name = "Qwen/Qwen3-8B"
aliases = ["chat"]
[[host]]
name = "one"
address = "10.0.0.1"
gpus = [0, 1]
workers = [{ role = "prefill", count = 2 }, { role = "store" }]
[[host]]
name = "two"
workers = [{ role = "decode", count = 2, gpus_per_worker = 4 }]
[[host]]
name = "three"
workers = [{ role = "prefill", count = 18 }]
"""


def values(text: str = FLEET) -> dict[str, Any]:
    return values_of(read_fleet_file(text, "127.0.0.1"))


def test_workers_of_one_role_are_one_statefulset_whatever_hosts_they_are_on():
    workers = values()["workers"]

    assert {name: (each["role"], each["replicas"]) for name, each in workers.items()} == {
        "prefill": ("prefill", 20), "store": ("store", 1), "decode": ("decode", 2)
    }  # fmt: skip
    assert (workers["prefill"]["gpus"], workers["decode"]["gpus"]) == (1, 4)
    assert "gpus" not in workers["store"]
    assert workers["store"]["memory"] == "2Gi"
    sized = values(FLEET.replace('role = "store"', 'role = "store", count = 2, memory = "8G", objects = "http://h/b"'))[
        "workers"
    ]["store"]
    assert (sized["memory"], sized["settings"]["WORKER_STORE_MEMORY_BYTES"]) == ("5Gi", str(4 << 30))
    assert sized["settings"]["WORKER_STORE_OBJECTS_URL"] == "http://h/b"
    assert workers["decode"]["settings"] == {"WORKER_MODEL": "Qwen/Qwen3-8B", "WORKER_ALIASES": "chat"}
    assert (workers["prefill"]["replicasMax"], workers["decode"]["replicasMax"]) == (40, 16)


def test_variables_of_all_are_settings_and_those_of_the_services_stay_with_them():
    found = values()

    assert found["settings"] == {"ROUTER_WAKE_S_MAX": "30", "WORKER_LEGS_MAX": "7"}
    assert found["router"] == {"port": 8080, "replicas": 3}
    assert found["collector"] == {"port": 8081}
    assert found["images"] == {"engine": "baton-engine-cuda:dev"}
    assert found["orchestrator"] == {"planner": False}


def test_hosts_with_other_variables_have_groups_of_their_own():
    workers = values(FLEET + '[host.env]\nUCX_NET_DEVICES = "eth1"\nWORKER_KV_HOST = "10.0.0.3"\n')["workers"]

    assert (workers["prefill"]["replicas"], workers["prefill-2"]["replicas"]) == (2, 18)
    assert workers["prefill-2"]["settings"]["UCX_NET_DEVICES"] == "eth1"
    assert "WORKER_KV_HOST" not in workers["prefill-2"]["settings"], "an address of that host"


def test_cores_make_engines_on_cpus_with_their_share_and_the_memory_of_their_kv():
    workers = values(
        '[[model]]\nname = "m"\nkv_cache = "2G"\n[[host]]\nname = "one"\ncores = [0, 1, 2, 3]\n'
        'workers = [{ role = "both", count = 2, gpus_per_worker = 2 }]\n'
    )["workers"]

    assert workers["both"] == {
        "role": "both",
        "replicas": 2,
        "replicasMax": 16,
        "cpu": "2",
        "memory": "6Gi",
        "limits": {"memory": "18Gi"},
        "settings": {
            "WORKER_KV_CACHE_BYTES": str(2 << 30), "WORKER_MODEL": "m", "WORKER_TENSOR_PARALLEL_SIZE": "2"
        },
    }  # fmt: skip


def test_models_have_groups_by_their_names_and_servers_their_key_from_a_secret():
    text = (
        '[[model]]\nname = "Org/Model-A.1"\n[[model]]\nname = "b"\n[[host]]\nname = "one"\nworkers = [\n'
        '{ model = "Org/Model-A.1", role = "both" },\n'
        '{ model = "b", attach = "http://gpu-7:80=theirs", attach_key_file = "/etc/key" }]\n'
    )
    fleet = read_fleet_file(text)
    found = values_of(fleet)

    assert list(found["workers"]) == ["model-a-1-both", "b-attached"]
    attached = found["workers"]["b-attached"]
    assert attached["attachKeySecret"] == "b-attached-key"
    assert attached["settings"] == {
        "WORKER_ATTACH_MODEL": "theirs",
        "WORKER_ATTACH_URL": "http://gpu-7:80",
        "WORKER_ENGINE": "attached",
        "WORKER_MODEL": "b",
    }
    assert "gpus" not in attached
    assert list(still_to_do(fleet)) == [
        "kubectl create namespace baton",
        "kubectl -n baton create secret generic b-attached-key --from-file=key=/etc/key",
    ]


def test_what_a_host_has_and_pods_do_not_is_said():
    fleet = read_fleet_file(
        '[[model]]\nname = "/srv/m"\n[[host]]\nname = "one"\nworkers = [\n'
        '{ role = "both" }, { attach = "http://127.0.0.1:30000" }]\n'
    )

    server, folder = still_to_do(fleet)
    assert server == "# http://127.0.0.1:30000 is the pod itself: attach needs an address that pods reach"
    assert folder.startswith("# /srv/m must be in the pods: worker.modelsVolume")


def test_the_planner_acts_through_kubernetes_where_the_file_lets_it_act():
    assert values(FLEET.replace("[env]", '[env]\nORCHESTRATOR_PLANNER = "act"'))["orchestrator"] == {"planner": True}


def test_grace_periods_follow_the_drains_of_the_file():
    found = values(FLEET.replace("[env]", "[env]\nWORKER_DRAIN_S_MAX = 600.5\nROUTER_DRAIN_S_MAX = 90"))

    assert found["worker"] == {"drainSeconds": 601}
    assert found["router"]["drainSeconds"] == 90
    assert not {"WORKER_DRAIN_S_MAX", "ROUTER_DRAIN_S_MAX"} & found["settings"].keys()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[env]", '[env]\nHF_TOKEN = "x"', "belongs into a Secret"),
        ("[env]", '[env]\nWORKER_DRAIN_S_MAX = "long"', "WORKER_DRAIN_S_MAX: write seconds"),
        ("[[model]]", '[[model]]\nengine_args = "-tp 2"', "number of ranks or stages"),
        (
            'role = "prefill", count = 2',
            'role = "prefill", data_parallel = 2',
            '"one" workers: data_parallel: .* a pod',
        ),
    ],
)
def test_what_cannot_be_is_said_with_its_place(before: str, after: str, message: str):
    with pytest.raises(WrongFleetFile, match=message):
        values(FLEET.replace(before, after, 1))


def test_the_command_writes_the_chart_and_leaves_other_folders_alone(tmp_path: Path):
    (tmp_path / "fleet.toml").write_text(FLEET)
    command = ("init", str(tmp_path / "chart"), "--kubernetes", str(tmp_path / "fleet.toml"))

    code, out, err = baton(*command)

    assert code == 0, err
    assert f"helm upgrade --install baton {tmp_path}/chart -f {tmp_path}/chart/fleet.yaml -n baton" in out
    assert yaml.safe_load((tmp_path / "chart/fleet.yaml").read_text()) == values()
    files = {str(path.relative_to(CHART)) for path in CHART.rglob("*") if path.is_file()}
    written = {str(path.relative_to(tmp_path / "chart")) for path in (tmp_path / "chart").rglob("*") if path.is_file()}
    assert written == files | {"fleet.yaml"}
    assert baton(*command)[0] == 0, "it can be repeated"
    with pytest.raises(CannotWriteService, match="has other files"):
        write_chart(tmp_path, {}, "fleet.toml")


def test_the_values_of_the_command_are_values_of_the_chart():
    """Each key is one that the chart documents; the nightly tests have helm check the rest."""
    documented = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]

    for name, table in values(FLEET.replace("[env]", "[env]\nWORKER_DRAIN_S_MAX = 60")).items():
        if name in {"settings", "workers"}:
            assert documented[name] == {}
        else:
            assert set(table) <= set(documented[name]) == set(schema[name]["properties"]), name
    assert set(documented) | {"global"} == set(schema)


def test_the_chart_runs_the_nats_of_compose():
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())

    assert yaml.safe_load((CHART / "values.yaml").read_text())["images"]["nats"] == compose["services"]["nats"]["image"]


def test_the_chart_has_batons_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["version"] == chart["appVersion"] == version
