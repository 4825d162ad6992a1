"""Each container has as few rights as it needs, on its machine and in itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.support.processes import ROOT

FILE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = FILE["services"]
CUDA = yaml.safe_load((ROOT / "compose/cuda.yaml").read_text().replace("!reset", ""))["services"]
OURS = [name for name, service in SERVICES.items() if service["image"].startswith("baton-")]
WORKERS = ["prefill", "decode", "store", "sim-prefill", "sim-decode", "sim-store"]
NOT_ROOT_BY_IMAGE = {"otel-collector", "tempo", "prometheus", "grafana"}
"""Their images name a user."""


def build_of(service: dict[str, Any]) -> dict[str, Any]:
    """One service builds the image of all others."""
    (build,) = [one["build"] for one in SERVICES.values() if "build" in one and one["image"] == service["image"]]
    return build


every_service = pytest.mark.parametrize("name", SERVICES)


@every_service
def test_no_service_has_privileges(name: str):
    service = SERVICES[name]

    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "pid", "userns_mode", "ipc"}
    assert service.get("devices", []) in ([], ["${RDMA_DEVICES:-/dev/null}"])  # Every container has /dev/null.
    assert service.get("network_mode", "none") == "none"
    assert "docker.sock" not in str(service)


@every_service
def test_no_service_runs_as_root(name: str):
    service = SERVICES[name]
    if name in OURS:
        build = build_of(service)
        last_stages = (ROOT / build["dockerfile"]).read_text().split("\nFROM ")
        target = build.get("target")
        stages = [stage for stage in last_stages if target is None or f" AS {target}\n" in stage]
        assert re.findall(r"^USER (\S+)$", stages[-1], re.MULTILINE) == ["baton"]
        assert "user" not in service
    else:
        assert name in NOT_ROOT_BY_IMAGE or service["user"].split(":")[0].isdigit()
        assert not service.get("user", "1").startswith(("0", "root"))


@every_service
def test_the_log_of_every_container_is_bounded(name: str):
    options = SERVICES[name]["logging"]["options"]

    assert int(options["max-size"].removesuffix("m")) * int(options["max-file"]) <= 64


@every_service
def test_only_tmp_and_named_volumes_are_writable(name: str):
    service = SERVICES[name]

    assert service["read_only"] is True
    assert service["tmpfs"][0].partition(":")[0] == "/tmp"
    for volume in service.get("volumes", []):
        if isinstance(volume, dict):
            assert volume["read_only"] is True
            continue
        source = volume.split(":")[0]
        assert volume.endswith(":ro") or source in FILE["volumes"] or source == "/home/baton/.local/state", volume


@pytest.mark.parametrize("name", OURS)
def test_a_tmpfs_in_the_users_home_belongs_to_the_user(name: str):
    dockerfile = (ROOT / build_of(SERVICES[name])["dockerfile"]).read_text()
    user = re.search(r"useradd --uid (\d+) ", dockerfile)
    assert user is not None

    for mount in SERVICES[name]["tmpfs"]:
        path, _, options = mount.partition(":")
        if path.startswith("/home/baton/"):
            assert {f"uid={user[1]}", f"gid={user[1]}"} <= set(options.split(",")), mount


@every_service
def test_processes_and_memory_are_limited_by_default(name: str):
    service = SERVICES[name]

    assert 0 < service["pids_limit"] <= 4096
    memory = re.fullmatch(r"\$\{(\w+):-(\w+)\}", service["mem_limit"])
    assert memory is not None
    assert memory[1] in (ROOT / "compose/env.example").read_text()
    assert memory[2] != "0" or "engine" in service["image"]


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_can_write_its_caches_and_its_state(name: str):
    service = SERVICES[name]
    memory = [where.partition(":")[0] for where in service["tmpfs"]]
    disk = [
        volume.split(":")[-1] for volume in service["volumes"] if isinstance(volume, str) and not volume.endswith(":ro")
    ]

    assert "/home/baton/.cache" in memory + disk
    assert "/home/baton/.local/state" in disk
    folders = {
        name: value for name, value in service["environment"].items() if name.endswith(("_DIR", "_PATH", "_ROOT"))
    }
    for read_only in ("WORKER_LORA_DIR", "WORKER_WEIGHTS_DIR"):
        folders.pop(read_only, None)
    assert all(folder.startswith("/home/baton/.cache/") for folder in folders.values()), folders


def test_the_models_of_real_engines_outlive_their_container():
    for name in ("prefill", "decode"):
        assert "models:/home/baton/.cache" in SERVICES[name]["volumes"]


def test_ports_are_published_on_this_machine_only_by_default():
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}

    assert set(published) == {"router", "collector", "prometheus", "grafana"}
    assert all(port.startswith("${BIND:-127.0.0.1}:") for port in published.pop("router"))
    assert all(port.startswith("${CONSOLE_BIND:-127.0.0.1}:") for ports in published.values() for port in ports)
    assert SERVICES["collector"]["environment"]["COLLECTOR_PUBLISHED_HOST"] == "${CONSOLE_BIND:-127.0.0.1}"


def test_grafana_has_no_account_and_prometheus_receives_nothing():
    grafana, prometheus = SERVICES["grafana"]["environment"], SERVICES["prometheus"]

    assert grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == grafana["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert grafana["GF_AUTH_BASIC_ENABLED"] == "false"
    assert not [name for name in grafana if "PASSWORD" in name]
    assert not [flag for flag in prometheus["command"] if "receiver" in flag or "web.enable" in flag]


def test_the_gpu_variant_loosens_no_other_restriction():
    """Engines share two namespaces with each other, never with the host, and the store gets no GPU."""
    engines = {name: service for name, service in CUDA.items() if name != "namespaces"}
    assert [name for name, service in CUDA.items() if "build" in service] == ["prefill"]
    for name, service in engines.items():
        loosened = service.keys() & {"read_only", "cap_drop", "cap_add", "security_opt", "privileged", "user", "tmpfs"}
        assert not loosened, name
        assert (service["pid"], service["ipc"]) == ("service:namespaces", "service:namespaces")
    assert set(engines) == {"prefill", "decode", "store"}
    assert "deploy" not in engines["store"]


def test_gpus_see_each_other_and_engines_compute_on_their_own():
    """cuda_ipc needs both: with one GPU per container UCX falls back to TCP."""
    for name in ("prefill", "decode"):
        (device,) = CUDA[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        assert CUDA[name]["environment"]["CUDA_VISIBLE_DEVICES"].startswith(f"${{{name.upper()}_GPU:-")
        assert CUDA[name]["environment"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_the_owner_of_the_engines_namespaces_can_do_nothing():
    owner = CUDA["namespaces"]

    assert owner["cap_drop"] == ["ALL"]
    assert owner["security_opt"] == ["no-new-privileges:true"]
    assert owner["read_only"] is True
    assert owner["network_mode"] == "none"
    assert owner["ipc"] == "shareable"
    assert owner["pids_limit"] <= 16
    assert not owner.keys() & {"privileged", "cap_add", "devices", "deploy", "user", "pid", "volumes", "environment"}
    assert int(owner["logging"]["options"]["max-size"].removesuffix("m")) <= 16
