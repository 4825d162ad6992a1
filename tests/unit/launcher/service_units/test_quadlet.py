"""Quadlets: what each container sees and may do, and that Podman's generator and systemd can read them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from services.launcher.service_files.host_services import CannotWriteService, HostServices, read_variables
from services.launcher.service_files.quadlet import Containers, folders, plain_variable_files, quadlet_files
from services.launcher.system.options import ModelOptions, UpOptions
from services.launcher.system.plan import plan_system
from services.launcher.system.process_plan import Machine

GENERATOR = shutil.which("quadlet", path=f"/usr/libexec/podman:/usr/lib/podman:{os.environ['PATH']}")
CONTAINERS = Containers(image="localhost/baton:1", state_dir="/s", models="/home/u/hf", uid=1000, gid=1001)
ON_GPUS = Machine(python="python", nats_server="nats-server", cores=(0, 1), gpus=("0", "1"))
Container = dict[str, list[str]]


def host(user: str = "u", engine: str = "vllm", model: str = "", machine: Machine = ON_GPUS) -> HostServices:
    options = UpOptions(
        models=(ModelOptions(model=model, prefill=1, decode=1),),
        engine="vllm" if engine == "vllm" else "simulated",
        keys_dir="/s/cluster",
        state_dir="/s",
        host_name="one",
    )
    given = {"WORKER_DRAIN_S_MAX": "100", "ROUTER_KEYS_FILE": "/k/keys.toml", "HF_HOME": "/home/u/hf"}
    return HostServices(
        processes=plan_system(options, machine).processes, inherited=given, folder="/s/services", user=user
    )


def containers(of: HostServices) -> dict[str, Container]:
    found: dict[str, Container] = {}
    for file in quadlet_files(of, CONTAINERS):
        keys: Container = defaultdict(list)
        for line in file.text.splitlines():
            name, is_key, value = line.partition("=")
            if is_key:
                keys[name].append(value)
        found[file.name] = keys
    return found


def test_units_have_the_names_and_the_order_that_they_have_without_containers():
    found = containers(host())

    assert list(found) == [
        "baton.target", "baton-nats.container", "baton-orchestrator.container", "baton-collector.container",
        "baton-router.container", "baton-worker@one-prefill-1.container", "baton-worker@one-decode-1.container",
    ]  # fmt: skip
    assert "baton-worker@one-decode-1.service" in found["baton.target"]["Wants"]
    assert "baton-nats.service" in found["baton-router.container"]["After"][0]
    assert "baton-router.service" in found["baton-worker@one-decode-1.container"]["After"][0]


def test_podman_and_systemd_wait_until_a_worker_has_drained():
    worker = containers(host())["baton-worker@one-decode-1.container"]

    assert "--stop-timeout=115" in worker["PodmanArgs"]
    assert worker["TimeoutStopSec"] == ["130"]
    assert worker["RestartPreventExitStatus"] == ["78"]


def test_engines_on_gpus_see_all_gpus_and_share_the_hosts_namespaces():
    found = containers(host())
    worker = found["baton-worker@one-decode-1.container"]

    assert worker["Network"] == ["host"]
    assert "--pid=host --ipc=host" in worker["PodmanArgs"]
    assert worker["AddDevice"] == ["nvidia.com/gpu=all", "-/dev/infiniband"]
    assert not {"AddDevice", "PodmanArgs=--pid=host"} & found["baton-router.container"].keys()
    assert "--pid=host --ipc=host" not in found["baton-router.container"]["PodmanArgs"]


def test_simulated_engines_get_no_gpus_and_namespaces_of_their_own():
    worker = containers(host(engine="simulated"))["baton-worker@one-decode-1.container"]

    assert "AddDevice" not in worker
    assert worker["PodmanArgs"] == ["--stop-timeout=115"]


def test_a_container_sees_its_own_keys_only():
    found = {name: container["Volume"] for name, container in containers(host()).items() if "Volume" in container}

    assert found["baton-nats.container"] == ["/s/nats:/s/nats:rw", "/s/cluster/nats:/s/cluster/nats:ro"]
    assert found["baton-router.container"] == [
        "/k:/k:ro", "/s/cluster/router:/s/cluster/router:ro", "/s/containers/router:/s:rw"
    ]  # fmt: skip
    assert found["baton-worker@one-decode-1.container"] == [
        "/s/cluster/worker:/s/cluster/worker:ro", "/s/containers/one-decode-1:/s:rw",
        "/s/containers/cache:/cache:rw", "/home/u/hf:/models:rw",
    ]  # fmt: skip
    assert not any(volume.startswith(("/s:", "/s/cluster:")) for volumes in found.values() for volume in volumes)


def test_folders_that_containers_write_exist_before():
    written = folders(host(), CONTAINERS)

    assert {"/s/nats", "/s/containers/router", "/s/containers/cache", "/home/u/hf"} <= {*written}


def test_a_model_in_a_folder_is_there_inside():
    assert "/data/m:/data/m:ro" in containers(host(model="/data/m"))["baton-worker@one-decode-1.container"]["Volume"]


def test_containers_run_as_the_owner_of_the_files_and_without_root_as_themselves():
    of_system, of_user = (containers(host(user))["baton-router.container"] for user in ("u", ""))

    assert (of_system["User"], of_system["Group"], "UserNS" in of_system) == (["1000"], ["1001"], False)
    assert (of_user["UserNS"], "User" in of_user) == (["keep-id"], False)


def test_every_container_is_confined_and_logs_to_the_journal():
    for name, container in containers(host()).items():
        if name != "baton.target":
            assert container["DropCapability"] == ["all"], name
            assert container["NoNewPrivileges"] == container["ReadOnly"] == ["true"]
            assert container["LogDriver"] == ["journald"]
            assert container["Image"] == ["localhost/baton:1"]


def test_variables_have_no_quotes_which_podman_would_keep():
    files = {each.name: each for each in plain_variable_files(host())}

    worker = read_variables(files["one-decode-1.env"].text)
    assert (worker["WORKER_WORKER_ID"], worker["HF_HOME"]) == ("one-decode-1", "/models")
    assert '"' not in files["one-decode-1.env"].text
    assert all(each.is_secret for each in files.values())


def test_a_folder_with_a_colon_is_refused():
    odd = Containers(image="x", state_dir="/a:b", models="/m", uid=0, gid=0)

    with pytest.raises(CannotWriteService, match="/a:b"):
        quadlet_files(host(), odd)


@pytest.mark.skipif(not GENERATOR, reason="Podman 4.4 or newer with its quadlet generator is not installed")
@pytest.mark.parametrize("user", ["u", ""])
def test_podmans_generator_and_systemd_accept_the_quadlets(tmp_path: Path, user: str):
    for each in quadlet_files(host(user), CONTAINERS):
        (tmp_path / each.name).write_text(each.text)
    units = tmp_path / "units"

    for arguments in (["-dryrun"], [str(units)]):
        done = subprocess.run(
            [str(GENERATOR), *([] if user else ["-user"]), "-no-kmsg-log", *arguments],
            env={**os.environ, "QUADLET_UNIT_DIRS": str(tmp_path)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "unsupported" not in done.stderr
    shutil.copy(tmp_path / "baton.target", units)
    made = (units / "baton-worker@one-decode-1.service").read_text()
    assert "--stop-timeout=115" in made
    assert "--cap-drop all" in made
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "verify", str(units / "baton.target")],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        expected = ("RestartSteps", "RestartMaxDelaySec", "/usr/bin/podman is not executable")
        assert [line for line in done.stderr.splitlines() if not any(each in line for each in expected)] == []
