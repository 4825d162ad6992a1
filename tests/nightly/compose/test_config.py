"""The compose files resolve to the intended configuration; needs no daemon."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.nightly.compose.conftest import ROOT
from tests.support.system import baton

pytestmark = pytest.mark.compose

LIGHT = {"init", "nats", "router", "orchestrator", "collector"}
CLIENT: dict[str, str] = {}
"""The environment in which `docker compose` works."""
ALL_WORKERS = "engines,simulated,store,simulated-store"


@pytest.fixture(autouse=True)
def client(compose_client: dict[str, str]) -> None:
    CLIENT.update(compose_client)


def services(profiles: str, *files: str, **settings: str) -> dict[str, dict[str, Any]]:
    chosen = (part for file in files for part in ("-f", file))
    command = ["docker", "compose", "--env-file", os.devnull, *chosen, "config"]
    environment = {**CLIENT, **settings, "COMPOSE_PROFILES": profiles}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)["services"]


def test_engines_start_without_a_profile_or_with_theirs_and_with_no_other_one():
    assert set(services("")) == LIGHT | {"prefill", "decode"}
    assert set(services("engines")) == LIGHT | {"prefill", "decode"}
    for other in ("observability", "tools"):
        assert not set(services(other)) & {"prefill", "decode"}
    assert set(services("attached")) == LIGHT | {"attached"}


def test_profiles_of_the_command_line_replace_the_engines_too():
    command = ["docker", "compose", "--env-file", os.devnull, "--profile", "simulated", "config", "--services"]
    environment = {name: value for name, value in CLIENT.items() if name != "COMPOSE_PROFILES"}

    named = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    none = subprocess.run(
        [part for part in command if part not in {"--profile", "simulated"}],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert set(named.stdout.split()) == LIGHT | {"sim-prefill", "sim-decode"}
    assert set(none.stdout.split()) == LIGHT | {"prefill", "decode"}


def test_settings_and_files_of_an_operator_reach_their_services(tmp_path: Path):
    libraries = tmp_path / "libraries.env"
    libraries.write_text("UCX_TLS=rc,cuda\n")
    system = services(
        "",
        ROUTER_SLOS='{"default": {"ttft_s": 2}}',
        ORCHESTRATOR_PLANNER="act",
        ENGINE_ENV_FILE=str(libraries),
        MODELS_FOLDER=str(tmp_path),
        LORA_FOLDER=str(tmp_path),
        WEIGHTS_FOLDER=str(tmp_path),
        RDMA_DEVICES="/dev/infiniband",
        ENGINE_MEMLOCK="-1",
    )

    assert system["router"]["environment"]["ROUTER_SLOS"] == '{"default": {"ttft_s": 2}}'
    assert system["orchestrator"]["environment"]["ORCHESTRATOR_PLANNER"] == "act"
    for engine in (system["prefill"], system["decode"]):
        assert engine["environment"]["UCX_TLS"] == "rc,cuda"
        assert engine["environment"]["WORKER_LORA_DIR"] == "/adapters"
        mounted = {each["target"]: each for each in engine["volumes"] if each["type"] == "bind"}
        assert {(each["source"], each["read_only"]) for each in mounted.values()} == {(str(tmp_path), True)}
        assert set(mounted) == {"/models", "/adapters", "/weights"}
        assert [device["source"] for device in engine["devices"]] == ["/dev/infiniband"]
        assert engine["ulimits"]["memlock"] == -1


def test_the_simulated_profile_needs_only_the_light_image():
    system = services("simulated")

    assert set(system) == LIGHT | {"sim-prefill", "sim-decode"}
    assert {str(service["image"]) for name, service in system.items() if name != "nats"} == {"baton-light:dev"}


def test_the_profile_of_a_store_starts_its_engines_too():
    for workers, store in (("engines", "store"), ("simulated", "simulated-store")):
        assert set(services(store)) == set(services(f"{workers},{store}"))
        assert set(services(store)) - set(services(workers)) == {store.replace("simulated", "sim")}


def test_a_key_file_is_given_without_a_leading_dot():
    (mount,) = [
        volume
        for volume in services("simulated", KEYS_FILE="keys.toml")["router"]["volumes"]
        if volume["target"] == "/etc/baton/keys.toml"
    ]

    assert (mount["type"], mount["source"]) == ("bind", str(ROOT / "keys.toml"))


def test_the_observability_profile_adds_its_four_services():
    added = set(services("engines,observability")) - set(services("engines"))

    assert added == {"otel-collector", "tempo", "prometheus", "grafana"}


@pytest.mark.parametrize("profiles", ["", "engines"])
def test_the_cuda_file_gives_each_worker_a_gpu_of_its_own_and_shows_it_all(profiles: str):
    system = services(profiles, "compose.yaml", "compose/cuda.yaml")
    engines = [system[name] for name in ("prefill", "decode")]

    assert set(system) == LIGHT | {"prefill", "decode", "namespaces"}
    devices = [engine["deploy"]["resources"]["reservations"]["devices"][0] for engine in engines]
    assert [device["count"] for device in devices] == [-1, -1]  # all
    assert [engine["environment"]["CUDA_VISIBLE_DEVICES"] for engine in engines] == ["0", "1"]
    assert {(engine["pid"], engine["ipc"]) for engine in engines} == {("service:namespaces", "service:namespaces")}
    assert all("shm_size" not in engine for engine in engines)
    assert all(engine["environment"]["WORKER_ROLE"] for engine in engines)


def test_every_service_of_ours_is_checked_restarted_and_unprivileged():
    for name, service in services(ALL_WORKERS).items():
        assert service["cap_drop"] == ["ALL"], name
        if name == "init":  # It makes the keys, and ends.
            continue
        assert service["restart"] == "unless-stopped", name
        assert "healthcheck" in service, name


def test_every_file_that_a_container_mounts_is_in_the_repository():
    for name, service in services(f"{ALL_WORKERS},observability").items():
        for volume in service.get("volumes", []):
            assert volume["type"] == "volume" or Path(volume["source"]).exists(), (name, volume["source"])


def test_the_file_of_a_fleets_host_resolves_to_its_command_and_its_variables(tmp_path: Path):
    (tmp_path / "fleet.toml").write_text(
        'engine = "simulated"\n[[host]]\nname = "one"\naddress = "127.0.0.1"\nworkers = [{ role = "both" }]\n'
    )
    state, token = str(tmp_path / "state"), "a $HOME ${X} \"b\" 'c' # d"
    code, out, err = baton(
        "service", "install", "--kind", "compose", "--image", "baton-light:dev", "--config", str(tmp_path / "fleet.toml"),
        "--name", "one", "--state-dir", state, "--out", str(tmp_path), env={"HF_TOKEN": token, "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert code == 0, out + err

    [(name, service)] = services("", str(tmp_path / "baton.compose.yaml")).items()

    assert name == "baton"
    assert [each.replace("$$", "$") for each in service["command"]] == [
        "baton", "up", "--config", str(tmp_path / "fleet.toml"), "--name", "one", "--keep-trying", "--state-dir", state
    ]  # fmt: skip
    assert service["environment"]["HF_TOKEN"].replace("$$", "$") == token
    assert {service["pid"], service["ipc"], service["network_mode"]} == {"host"}
    assert (service["read_only"], service["cap_drop"], service["user"]) == (
        True,
        ["ALL"],
        f"{os.geteuid()}:{os.getegid()}",
    )
    mounts = {each["target"]: each.get("read_only", False) for each in service["volumes"]}
    assert mounts[state] is False
    assert mounts[str(tmp_path / "fleet.toml")] is True
    assert service["stop_grace_period"] == "2m55s"
