"""One unit or container for a host: what it runs and may do, and that systemd and Podman can read it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from services.launcher.fleet.fleet_file import HostPart
from services.launcher.service_files.files import (
    CannotWriteService,
    Container,
    HostService,
    command_line,
    compose_file,
    container_variables,
    folders_read,
    host_stop_s,
    plain_variables,
    quadlet,
    quoted_variables,
    systemd_unit,
)

GENERATOR = shutil.which("quadlet", path=f"/usr/libexec/podman:/usr/lib/podman:{os.environ['PATH']}")
KNOWN_SINCE_254 = ("RestartSteps", "RestartMaxDelaySec")
"""Keys that an older systemd names and ignores."""
HOST = HostService(
    command=(sys.executable, "-m", "services.launcher", "up", "--config", "/home/u/my fleet.toml"),
    upgrade=(sys.executable, "-m", "services.launcher", "service", "upgrade"),
    variables={"HF_TOKEN": 'a "b" $c'},
    variables_file="/s/service.env",
    stop_s=600,
    of_system=True,
)
OF_USER = replace(HOST, of_system=False)
CONTAINER = Container(
    image="localhost/baton:1",
    state_dir="/s",
    models="/hf",
    reads=["/k", "/k", "/s/cluster/router"],
    uid=1000,
    gid=1001,
    has_gpus=True,
)
RESTARTS = {
    "Restart": ["on-failure"],
    "RestartPreventExitStatus": ["78"],
    "RestartSec": ["1"],
    "StartLimitIntervalSec": ["0"],
    "TimeoutStartSec": ["infinity"],
    "OOMPolicy": ["continue"],
}
"""The start may load a model for as long as it takes, and failures never use up a number of starts."""
Unit = dict[str, list[str]]


def parsed(text: str) -> Unit:
    assert "@" not in text.replace("baton@", "")
    found: Unit = defaultdict(list)
    for line in text.splitlines():
        name, is_key, value = line.partition("=")
        if is_key and not line.startswith("#"):
            found[name].append(value)
    return found


def verify(unit: Path) -> list[str]:
    """What systemd has to say about it."""
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if not any(key in line for key in KNOWN_SINCE_254)]


def test_a_host_drains_restarts_after_failures_and_survives_an_engine_without_memory():
    for host in (HOST, OF_USER):
        unit, in_container = parsed(systemd_unit(host, "root")), parsed(quadlet(host, CONTAINER))

        assert RESTARTS.items() <= unit.items()
        assert RESTARTS.items() <= in_container.items()
        assert (unit["KillMode"], unit["TimeoutStopSec"]) == (["mixed"], ["600"])
        assert unit["WatchdogSec"] == ["120"]
        assert "WatchdogSec" not in in_container  # Podman does not pass the launcher's heartbeats on.
        assert unit["ExecReload"][0].endswith("service upgrade")
        assert unit["ExecStart"][0].endswith('up --config "/home/u/my fleet.toml"')
        assert in_container["ExecReload"][0].startswith("/usr/bin/podman exec baton ")
        assert in_container["ExecReload"][0].endswith("service upgrade")
        assert in_container["Exec"] == unit["ExecStart"]
        assert unit["EnvironmentFile"] == in_container["EnvironmentFile"] == ["/s/service.env"]
        assert (
            unit["WantedBy"] == in_container["WantedBy"] == [host.of_system * "multi-user.target" or "default.target"]
        )


def test_a_unit_of_the_system_is_confined_and_has_no_privileges():
    unit = parsed(systemd_unit(HOST, "serving"))

    assert {"User": ["serving"], "UMask": ["0077"], "CapabilityBoundingSet": [""]}.items() <= unit.items()
    assert unit["NoNewPrivileges"] == unit["RestrictSUIDSGID"] == unit["LockPersonality"] == ["yes"]
    assert unit["ProtectSystem"] == ["full"]
    for protected in ("KernelTunables", "KernelModules", "KernelLogs", "ControlGroups", "Hostname"):
        assert unit[f"Protect{protected}"] == ["yes"]


def test_a_host_keeps_its_gpus_and_may_lock_memory():
    unit = parsed(systemd_unit(HOST, "root"))

    for each in (unit, parsed(systemd_unit(OF_USER, "root"))):
        assert (each["LimitMEMLOCK"], each["LimitNOFILE"], each["TasksMax"]) == (["infinity"], ["65536"], ["infinity"])
    assert not {"PrivateDevices", "ProtectClock", "DevicePolicy", "MemoryDenyWriteExecute", "PrivateTmp"} & unit.keys()


def test_a_unit_of_a_user_asks_for_nothing_that_only_root_may():
    unit = parsed(systemd_unit(OF_USER, "root"))

    assert not {"User", "ProtectSystem", "CapabilityBoundingSet"} & unit.keys()
    assert unit["NoNewPrivileges"] == ["yes"]


def test_the_head_host_may_stop_as_long_as_its_stages_after_each_other():
    part = HostPart(name="one", env={"WORKER_DRAIN_S_MAX": "600"})

    assert host_stop_s(part, {}, is_head=False) == 615
    assert host_stop_s(part, {}, is_head=True) == 615 + 45 + 45 + 25
    assert host_stop_s(part, {"WORKER_DRAIN_S_MAX": "5"}, is_head=False) == 20


def test_a_container_of_compose_runs_the_host_as_a_quadlet_does():
    [service] = yaml.safe_load(compose_file(HOST, CONTAINER).replace("$$", "$"))["services"].values()
    podman = parsed(quadlet(HOST, CONTAINER))

    assert service["command"] == list(HOST.command)
    assert service["environment"] == container_variables(HOST, CONTAINER)
    assert service["environment"]["HF_TOKEN"] == 'a "b" $c'
    assert service["user"] == f"{podman['User'][0]}:{podman['Group'][0]}" == "1000:1001"
    assert service["volumes"] == podman["Volume"]
    assert service["stop_grace_period"] == "600s"
    assert service["tmpfs"] == ["/tmp:exec,mode=1777"]
    assert {service["network_mode"], service["pid"], service["ipc"]} == {"host"}
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"]) == ("nvidia", "all")
    [without] = yaml.safe_load(compose_file(HOST, replace(CONTAINER, has_gpus=False)))["services"].values()
    assert without["deploy"] == {}
    assert (service["ulimits"], without["ulimits"]) == ({"memlock": -1}, {}), "not every daemon may lift the limit"


def test_values_that_would_add_a_line_are_refused():
    for write in (quoted_variables, plain_variables):
        with pytest.raises(CannotWriteService, match="HF_TOKEN has more than one line"):
            write({"HF_TOKEN": "a\nExecStart=/bin/sh"})


def test_arguments_mean_themselves_to_systemd():
    assert command_line(["/bin/a b", "50%", "$HOME", 'say "x"']) == '"/bin/a b" "50%%" "$$HOME" "say \\"x\\""'


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("host", [HOST, OF_USER])
def test_systemd_accepts_the_unit(tmp_path: Path, host: HostService):
    unit = tmp_path / "baton.service"
    unit.write_text(systemd_unit(host, "root"))

    assert verify(unit) == []


def test_a_container_is_confined_and_podman_waits_until_the_host_has_drained():
    found = parsed(quadlet(HOST, CONTAINER))

    assert found["PodmanArgs"][-1] == "--pid=host --ipc=host --stop-timeout=600"
    assert found["TimeoutStopSec"] == ["615"]
    assert found["DropCapability"] == ["all"]
    assert found["NoNewPrivileges"] == found["ReadOnly"] == found["SecurityLabelDisable"] == ["true"]
    assert found["Tmpfs"] == ["/tmp:exec,mode=1777"]
    assert (found["Image"], found["ContainerName"]) == (["localhost/baton:1"], ["baton"])
    assert (found["Network"], found["LogDriver"]) == (["host"], ["journald"])


def test_a_container_writes_state_and_models_and_reads_what_it_names():
    assert parsed(quadlet(HOST, CONTAINER))["Volume"] == ["/s:/s:rw", "/hf:/hf:rw", "/k:/k:ro"]
    assert folders_read({"ROUTER_KEYS_FILE": "/k/keys.toml", "X_FILE": "relative", "HF_HOME": "/hf"}) == ["/k"]


def test_only_engines_on_gpus_get_gpus_and_only_root_lifts_the_limit_of_locked_memory():
    assert parsed(quadlet(HOST, CONTAINER))["AddDevice"] == ["nvidia.com/gpu=all", "-/dev/infiniband"]
    assert "--ulimit=memlock=-1:-1" in parsed(quadlet(HOST, CONTAINER))["PodmanArgs"]
    assert "--ulimit=memlock=-1:-1" not in parsed(quadlet(OF_USER, CONTAINER))["PodmanArgs"]
    assert "AddDevice" not in parsed(quadlet(HOST, replace(CONTAINER, has_gpus=False)))


def test_a_container_runs_as_the_owner_of_the_files_and_without_root_as_itself():
    of_system, of_user = parsed(quadlet(HOST, CONTAINER)), parsed(quadlet(OF_USER, CONTAINER))

    assert (of_system["User"], of_system["Group"], "UserNS" in of_system) == (["1000"], ["1001"], False)
    assert (of_user["UserNS"], "User" in of_user) == (["keep-id"], False)


def test_variables_of_a_container_have_no_quotes_which_podman_would_keep():
    lines = plain_variables(container_variables(HOST, CONTAINER)).splitlines()

    assert {'HF_TOKEN=a "b" $c', "HF_HOME=/hf", "XDG_CACHE_HOME=/s/cache", "HOME=/tmp"} <= {*lines}


def test_a_folder_with_a_colon_is_refused():
    with pytest.raises(CannotWriteService, match="/a:b"):
        quadlet(HOST, replace(CONTAINER, state_dir="/a:b"))


@pytest.mark.skipif(not GENERATOR, reason="Podman 4.4 or newer with its quadlet generator is not installed")
@pytest.mark.parametrize("host", [HOST, OF_USER])
def test_podmans_generator_and_systemd_accept_the_quadlet(tmp_path: Path, host: HostService):
    (tmp_path / "baton.container").write_text(quadlet(host, CONTAINER))
    units = tmp_path / "units"

    for arguments in (["-dryrun"], [str(units)]):
        done = subprocess.run(
            [str(GENERATOR), *([] if host.of_system else ["-user"]), "-no-kmsg-log", *arguments],
            env={**os.environ, "QUADLET_UNIT_DIRS": str(tmp_path)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "unsupported" not in done.stderr
    made = (units / "baton.service").read_text()
    assert "--stop-timeout=600" in made
    assert "--cap-drop all" in made
    if shutil.which("systemd-analyze"):
        assert [line for line in verify(units / "baton.service") if "/usr/bin/podman is not exec" not in line] == []
