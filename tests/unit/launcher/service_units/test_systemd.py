"""Units: what starts, restarts and stops in which order, and that systemd and the processes can read them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.launcher.service_files.host_services import CannotWriteService, HostServices, read_variables
from services.launcher.service_files.systemd import command_line, unit_files, variable_files, variables_text
from services.launcher.system.options import ModelOptions, UpOptions
from services.launcher.system.plan import plan_system
from services.launcher.system.process_plan import Machine, ProcessPlan

MACHINE = Machine(python=sys.executable, nats_server=sys.executable, cores=(0, 1))
OPTIONS = UpOptions(
    models=(ModelOptions(prefill=1, decode=1),), keys_dir="/s/cluster", state_dir="/s", host_name="one", join=False
)
KNOWN_SINCE_254 = ("RestartSteps", "RestartMaxDelaySec")
"""Keys that an older systemd names and ignores."""
Unit = dict[str, list[str]]


def processes() -> tuple[ProcessPlan, ...]:
    return plan_system(OPTIONS, MACHINE).processes


def parsed(text: str) -> Unit:
    found: Unit = defaultdict(list)
    for line in text.splitlines():
        name, is_key, value = line.partition("=")
        if is_key:
            found[name].append(value)
    return found


def host(user: str = "root", inherited: Mapping[str, str] | None = None) -> HostServices:
    return HostServices(processes=processes(), inherited=inherited or {}, folder="/s/services", user=user)


def units(of: HostServices | None = None) -> dict[str, Unit]:
    return {each.name: parsed(each.text) for each in unit_files(of or host())}


def test_the_target_has_every_process_and_an_instance_for_each_worker():
    assert units()["baton.target"]["Wants"] == [
        "baton-nats.service", "baton-orchestrator.service", "baton-collector.service", "baton-router.service",
        "baton-worker@one-prefill-1.service", "baton-worker@one-decode-1.service",
    ]  # fmt: skip


def test_nats_starts_first_and_workers_last_and_nothing_ends_with_another():
    found = units()
    after = {name: unit["After"][0].split() for name, unit in found.items() if name != "baton.target"}

    assert after["baton-nats.service"] == ["network-online.target"]
    assert after["baton-collector.service"] == ["network-online.target", "baton-nats.service"]
    assert "baton-orchestrator.service" in after["baton-router.service"]
    assert "baton-router.service" in after["baton-worker@.service"]
    assert not any({"Requires", "BindsTo"} & unit.keys() for unit in found.values())
    assert all(unit["PartOf"] == ["baton.target"] for name, unit in found.items() if name != "baton.target")


def test_a_process_that_fails_is_restarted_unless_its_configuration_is_wrong():
    for name, unit in units().items():
        if name != "baton.target":
            assert (unit["Restart"], unit["RestartPreventExitStatus"]) == (["on-failure"], ["78"])
            assert unit["StartLimitIntervalSec"] == ["0"]
            assert unit["KillMode"] == ["mixed"]


def test_a_worker_may_drain_as_long_as_its_setting_says():
    slow = units(host(inherited={"WORKER_DRAIN_S_MAX": "600"}))

    assert units()["baton-worker@.service"]["TimeoutStopSec"] == ["45"]
    assert slow["baton-worker@.service"]["TimeoutStopSec"] == ["615"]
    assert slow["baton-router.service"]["TimeoutStopSec"] == ["45"]


def test_workers_keep_their_gpus_and_may_lock_memory():
    worker = units()["baton-worker@.service"]

    assert (
        not {"PrivateDevices", "ProtectClock", "DevicePolicy", "MemoryDenyWriteExecute", "PrivateTmp"} & worker.keys()
    )
    assert worker["LimitMEMLOCK"] == ["infinity"]
    assert units()["baton-router.service"]["PrivateDevices"] == ["yes"]


def test_units_of_a_user_ask_for_nothing_that_only_root_may():
    for name, unit in units(host(user="")).items():
        assert not {"User", "ProtectSystem", "PrivateDevices", "CapabilityBoundingSet"} & unit.keys(), name
    assert units(host(user=""))["baton.target"]["WantedBy"] == ["default.target"]


def test_variables_have_those_of_the_plan_and_nats_inherits_none():
    given = {"HF_TOKEN": "x", "BATON_NATS_URL": "wrong"}
    files = {each.name: each for each in variable_files(host(inherited=given))}

    worker = read_variables(files["one-decode-1.env"].text)
    assert (worker["HF_TOKEN"], worker["BATON_NATS_URL"]) == ("x", "tls://127.0.0.1:4222")
    assert worker["WORKER_WORKER_ID"] == "one-decode-1"
    assert files["nats.env"].text == ""
    assert all(each.is_secret for each in files.values())


def test_a_value_of_several_lines_is_refused():
    with pytest.raises(CannotWriteService, match="HF_TOKEN has more than one line"):
        variables_text({"HF_TOKEN": "a\nExecStart=/bin/sh"})


def test_arguments_mean_themselves_to_systemd():
    assert command_line(["/bin/a b", "50%", "$HOME", 'say "x"']) == '"/bin/a b" "50%%" "$$HOME" "say \\"x\\""'


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("user", ["root", ""])
def test_systemd_accepts_the_units(tmp_path: Path, user: str):
    for each in unit_files(host(user)):
        (tmp_path / each.name).write_text(each.text)

    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "baton.target")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    complaints = [line for line in done.stderr.splitlines() if not any(key in line for key in KNOWN_SINCE_254)]
    assert done.returncode == 0, done.stderr
    assert complaints == []
