"""One fleet file, and every form that runs it: each starts the same workers of the same models, with as many GPUs, or on
cores.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import pytest
import yaml

from services.launcher.commands.service import Kind
from services.launcher.fleet.fleet_file import Fleet, part_of, read_fleet_file
from services.launcher.fleet.head import create_fleet_keys, make_token, nats_url_of
from services.launcher.fleet.joining import store
from services.launcher.system.launch import narrowed
from services.launcher.system.options import UpOptions
from services.launcher.system.plan import plan_workers
from services.launcher.system.process_plan import Machine
from shared.contracts.workers import Role
from tests.support.system import baton

FILE = """
env = { ORCHESTRATOR_PLANNER = "off" }
[[model]]
name = "A"
[[model]]
name = "B"
kv_cache = "2G"
[[host]]
name = "one"
address = "127.0.0.1"
workers = [{ model = "A", role = "prefill", count = 3 }, { model = "A", role = "store" }]
[[host]]
name = "two"
gpus = [1, 2, 3, 4, 5, 6]
workers = [{ model = "A", role = "decode", count = 2, gpus_per_worker = 2 }, { model = "B", role = "both", count = 2 }]
[[host]]
name = "three"
workers = [{ model = "A", role = "prefill", count = 1 }, { model = "B", attach = "http://127.0.0.1:1=b" }]
[[host]]
name = "four"
cores = [2, 3]
workers = [{ model = "B", role = "both" }]
"""
HOSTS = ("one", "two", "three", "four")
WORKERS = Counter(
    {
        ("A", "prefill", 1): 4, ("A", "store", 0): 1, ("A", "decode", 2): 2, ("B", "both", 1): 2, ("B", "attached", 0): 1,
        ("B", "both", 0): 1,
    }
)  # fmt: skip
MACHINE = Machine(python="python", nats_server="/n", cores=(0, 1, 2, 3), gpus=tuple(map(str, range(8))))
Worker = tuple[str, str, int]
"""Model, role and GPUs."""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Where all hosts have joined."""
    path = tmp_path / "fleet.toml"
    path.write_text(FILE)
    fleet, keys, state = read_fleet_file(FILE), tmp_path / "keys", tmp_path / "state"
    with mock.patch.dict(os.environ):
        create_fleet_keys(keys, fleet, datetime.now(UTC))
        for host in fleet.host:
            if host is not fleet.head:
                store(state, make_token(keys, nats_url_of(fleet), part_of(fleet, host.name)))
        yield path


def of_host(fleet: Fleet, name: str) -> Iterator[Worker]:
    """What `baton up --config` and `baton join` start there."""
    part = part_of(fleet, name)
    options = UpOptions(
        models=part.models,
        engine=part.engine,
        host_name=name,
        join=True,
        state_dir="/s",
        gpus=part.gpus,
        cores=part.cores,
    )
    for plan in plan_workers(options, narrowed(MACHINE, options), {}, ())[0]:
        env = plan.env
        if env["WORKER_ENGINE"] == "attached":
            yield env["WORKER_MODEL"], "attached", 0
        else:
            devices = env.get("CUDA_VISIBLE_DEVICES", "")
            yield env["WORKER_MODEL"], env["WORKER_ROLE"], len(devices.split(",")) if devices else 0


def hosts_of_command(line: str) -> Iterator[Worker]:
    """A command line `baton up --config FILE --name HOST ...`."""
    words = shlex.split(line)
    assert words[words.index("up") + 1] == "--config"
    yield from of_host(
        read_fleet_file(Path(words[words.index("--config") + 1]).read_text()), words[words.index("--name") + 1]
    )


def installed(file: Path, kind: Kind, *options: str) -> str:
    arguments = ("--kind", kind.value, "--config", str(file), "--state-dir", str(file.parent / "state"), "--print")
    code, out, err = baton("service", "install", *arguments, *options)
    assert code == 0, out + err
    return out


def of_each_host(file: Path, kind: Kind, key: str, *options: str) -> Iterator[Worker]:
    for host in HOSTS:
        text = installed(file, kind, "--name", host, *options)
        [line] = re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)
        yield from hosts_of_command(line)


def of_containers(file: Path) -> Iterator[Worker]:
    """One on each host."""
    for host in HOSTS:
        [service] = yaml.safe_load(installed(file, Kind.COMPOSE, "--name", host, "--image", "x"))["services"].values()
        yield from hosts_of_command(shlex.join(service["command"]))


def of_job(file: Path) -> Iterator[Worker]:
    """The job starts `baton up --config FILE --name HOST` on the first node and joins the others with their tokens."""
    text = installed(file, Kind.SLURM)
    [config] = re.findall(r"^fleet=(.*)$", text, re.MULTILINE)
    [hosts] = re.findall(r"^hosts=\((.*)\)$", text, re.MULTILINE)
    [gpus] = re.findall(r"^#SBATCH --gpus-per-node=(\d+)$", text, re.MULTILINE)
    [cpus] = re.findall(r"^#SBATCH --mincpus=(\d+)$", text, re.MULTILINE)
    assert (gpus, cpus) == ("7", "4")
    for host in shlex.split(hosts):
        yield from of_host(read_fleet_file(Path(shlex.split(config)[0]).read_text(), "127.0.0.1"), host)


def of_chart(file: Path) -> Iterator[Worker]:
    """Pods of the chart's values."""
    code, _out, err = baton("init", str(file.parent / "chart"), "--kubernetes", str(file))
    assert code == 0, err
    for group in yaml.safe_load((file.parent / "chart/fleet.yaml").read_text())["workers"].values():
        role = "attached" if group["settings"].get("WORKER_ENGINE") == "attached" else group["role"]
        yield from [(group["settings"]["WORKER_MODEL"], role, group.get("gpus", 0))] * group["replicas"]


FORMS: dict[str, Callable[[Path], Sequence[Worker] | Iterator[Worker]]] = {
    "up": lambda file: [worker for host in HOSTS for worker in of_host(read_fleet_file(file.read_text()), host)],
    Kind.SYSTEMD.value: lambda file: of_each_host(file, Kind.SYSTEMD, "ExecStart"),
    Kind.QUADLET.value: lambda file: of_each_host(file, Kind.QUADLET, "Exec", "--image", "x"),
    Kind.COMPOSE.value: of_containers,
    Kind.SLURM.value: of_job,
    "kubernetes": of_chart,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_each_form_runs_the_workers_of_the_file(form: str, file: Path):
    assert Counter(FORMS[form](file)) == WORKERS


def test_no_form_is_left_out():
    assert {kind.value for kind in Kind} < FORMS.keys()
    assert {role for _model, role, _gpus in WORKERS} == {*Role, "attached"}
