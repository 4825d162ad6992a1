"""The environment that child processes inherit, and the machine's GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.launcher.system.machine import gpu_facts, gpus_of_workers, inherited_environment


@pytest.mark.parametrize(("own", "given"), [(None, "keys.toml"), ("others.toml", "others.toml"), ("", "")])
def test_the_routers_keys_are_the_consoles_unless_it_has_its_own(tmp_path, monkeypatch, own, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.toml").touch()
    monkeypatch.setenv("ROUTER_KEYS_FILE", "keys.toml")
    monkeypatch.delenv("COLLECTOR_ADMIN_KEY_FILE", raising=False)
    if own is not None:
        monkeypatch.setenv("COLLECTOR_ADMIN_KEY_FILE", own)

    assert inherited_environment()["COLLECTOR_ADMIN_KEY_FILE"] == given


def test_a_missing_key_file_is_left_to_the_routers(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUTER_KEYS_FILE", str(tmp_path / "none.toml"))
    monkeypatch.delenv("COLLECTOR_ADMIN_KEY_FILE", raising=False)

    assert "COLLECTOR_ADMIN_KEY_FILE" not in inherited_environment()


TABLE = Path(__file__).with_name("topologies") / "two_cards.txt"
NVIDIA_SMI = f"""#!/bin/sh
case "$1" in
  topo) cat {TABLE} ;;
  --query-gpu=index) printf '0\\n1\\n' ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture
def two_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose nvidia-smi knows two GPUs."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text(NVIDIA_SMI)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("two_cards")
def test_gpus_come_with_their_topology():
    facts = gpu_facts()

    assert facts["gpus"] == ("0", "1")
    assert facts["gpu_topology"] == TABLE.read_text()


@pytest.mark.usefixtures("two_cards")
def test_the_topology_is_unknown_for_indexes_in_an_order_of_the_users_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert (gpu_facts()["gpus"], gpu_facts()["gpu_topology"]) == (("1", "0"), "")

    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert gpu_facts()["gpu_topology"] != ""


def test_without_nvidia_smi_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert gpu_facts() == {}


@pytest.mark.parametrize("module", ["services.worker", "baton_serve.services.worker"])
def test_running_workers_show_which_gpus_they_use(module: str):
    """Those of a checkout, and of an installation."""
    waits = [sys.executable, "-c", "print(flush=True); input()", "-m", module]
    ours = f"{os.getpid()}"  # The same test may run elsewhere on this machine.
    with subprocess.Popen(
        waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "CUDA_VISIBLE_DEVICES": f"5,{ours}"}
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()  # While it replaces Python by the command, its command line is empty.
        assert psutil.Process(worker.pid).cmdline() == waits
        assert {"5", ours} <= set(gpus_of_workers())
        worker.communicate(b"end\n")

    assert ours not in gpus_of_workers()
