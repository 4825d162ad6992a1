"""Writes Baton's Helm chart, and the values of a fleet file for it: a group of workers for each model and role."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import as_file, files
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from services.launcher.fleet.fleet_file import FOR_SERVICES, Fleet, HostPart, WrongFleetFile, part_of
from services.launcher.service_files.files import CannotWriteService
from services.launcher.system.devices import ranks_in_stages
from services.launcher.system.options import ModelOptions, UpOptions
from services.launcher.system.plan import check, worker_settings
from services.launcher.system.process_plan import PlanRefused
from shared.contracts.workers import Role
from shared.loopback import is_loopback

CHART, OF_CHART, VALUES = "chart", "Chart.yaml", "fleet.yaml"
KEYS_MIN = 16
"""Pods for which each group has keys at least, so that some can be added without new keys."""
NAME_CHARS_MAX = 50
TAKEN = ("router", "orchestrator", "collector", "nats", "tools", "keys")
"""Names of pods that are no workers."""
WAITS = {
    "router": {"drainSeconds": "ROUTER_DRAIN_S_MAX", "leaveSeconds": "ROUTER_LEAVE_S"},
    "worker": {"drainSeconds": "WORKER_DRAIN_S_MAX"},
}
"""Variables on which grace periods of pods depend, by the chart's values."""
OF_HOSTS = ("WORKER_KV_HOST", "WORKER_DRAIN_S_MAX")
"""Variables that are not for the pods of one host of the file."""
SECRET = "HF_TOKEN"  # noqa: S105  # the name of a variable
CUDA_IMAGE, CPU_IMAGE = "baton-engine-cuda:dev", "baton-engine-cpu:dev"
GIB = 1 << 30
ENGINE_GIB, ENGINE_GIB_MAX = 4, 16
"""Memory of an engine on a CPU besides its KV cache: what it asks for, and its limit."""
STORE_GIB, STORE_GIB_MAX = 1, 3
"""Memory of a store besides its copies."""


class Group(NamedTuple):
    """Workers that are alike: the pods of one StatefulSet, wherever Kubernetes runs them."""

    model: str
    role: Role
    settings: tuple[tuple[str, str], ...]
    gpus: int = 0
    cpus: int = 0
    memory_gib: int = 0
    """Memory for KV outside of GPUs."""
    key_file: str = ""
    """File with the API key of an attached server."""


def values_of(fleet: Fleet) -> dict[str, Any]:
    """The chart's values. Raises WrongFleetFile."""
    parts = [part_of(fleet, host.name) for host in fleet.host]
    for part in parts:
        _check(part)
    shared = _shared(parts)
    head = next(part for part in parts if part.name == fleet.head.name)
    services = {name: value for name, value in head.env.items() if name.startswith(FOR_SERVICES)}
    settings = {**shared, **services}
    if fleet.engine != "vllm":
        settings["WORKER_ENGINE"] = fleet.engine
    acts = settings.get("ORCHESTRATOR_PLANNER") == "act"
    waits = {table: _waits(parts, settings, found) for table, found in WAITS.items()}
    counts = _counted(parts)
    has_gpus = any(group.gpus for group in counts)
    workers = {name: _entry(name, group, counts[group]) for name, group in _named(counts).items()}
    for name, group in _named(counts).items():
        workers[name] |= {"image": CPU_IMAGE} if has_gpus and group.cpus else {}
    return {
        **({"images": {"engine": CUDA_IMAGE}} if has_gpus else {}),
        "settings": settings,
        "orchestrator": {"planner": acts},
        "router": {
            "port": fleet.router.port,
            **({"replicas": fleet.router.count} if fleet.router.count > 1 else {}),
            **waits["router"],
        },
        **({"worker": waits["worker"]} if waits["worker"] else {}),
        "collector": {"port": fleet.collector.port},
        "workers": workers,
    }


def still_to_do(fleet: Fleet) -> Iterator[str]:
    """What an operator must do before the start, one line each."""
    groups = _named(_counted([part_of(fleet, host.name) for host in fleet.host]))
    if any(group.key_file for group in groups.values()):
        yield "kubectl create namespace baton"
    for name, group in groups.items():
        if group.key_file:
            yield f"kubectl -n baton create secret generic {_key_secret(name)} --from-file=key={group.key_file}"
    servers = {dict(group.settings).get("WORKER_ATTACH_URL", "") for group in groups.values()}
    for url in sorted(each for each in servers if is_loopback(urlsplit(each).hostname or "")):
        yield f"# {url} is the pod itself: attach needs an address that pods reach"
    for folder in sorted({group.model for group in groups.values() if group.model.startswith("/")}):
        yield f"# {folder} must be in the pods: worker.modelsVolume names a volume, which they have at /models"


def write_chart(folder: Path, values: Mapping[str, Any], source: str) -> None:
    """The chart, and the values beside its own. Raises OSError, CannotWriteService."""
    if folder.exists() and any(folder.iterdir()) and not (folder / OF_CHART).exists():
        raise CannotWriteService(f"{folder} has other files: name an empty folder, or a new one")
    with as_file(files(__package__) / CHART) as chart:
        shutil.copytree(chart, folder, dirs_exist_ok=True)
    head = f"# Written by `baton init --kubernetes {source}`. Your own values belong into a further file.\n"
    (folder / VALUES).write_text(head + as_yaml(values), encoding="utf-8")


def as_yaml(table: Mapping[str, Any], indent: str = "") -> str:
    """Nested tables as YAML. Other values are written as JSON, which YAML contains."""
    lines = (
        f"{indent}{name}:\n{as_yaml(value, f'{indent}  ')}"
        if isinstance(value, Mapping) and value
        else f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}\n"
        for name, value in table.items()
    )
    return "".join(lines)


def _shared(parts: Sequence[HostPart]) -> dict[str, str]:
    """Variables that all hosts have."""
    first = parts[0].env.items()
    return {name: value for name, value in first if all(part.env.get(name) == value for part in parts)}


def _counted(parts: Sequence[HostPart]) -> Counter[Group]:
    """The groups, and their workers on all hosts."""
    shared = _shared(parts)
    return Counter(group for part in parts for group in _groups(part, shared))


def _key_secret(name: str) -> str:
    return f"{name}-key"


def _check(part: HostPart) -> None:
    if SECRET in part.env:
        raise WrongFleetFile(
            f'[[host]] "{part.name}" env {SECRET}: on Kubernetes it belongs into a Secret: leave it out, and name '
            "a Secret that has it in the chart's value settingsSecret"
        )
    if any(model.group_of(role) > 1 for model in part.models for role in model.roles):
        raise WrongFleetFile(
            f'[[host]] "{part.name}" workers: data_parallel: the chart has a pod for each worker, and all workers of a '
            "data parallel group are on one host: start them with `baton up --config`, or leave data_parallel out"
        )
    if any(model.spans for model in part.models):
        raise WrongFleetFile(
            f'[[host]] "{part.name}" workers: hosts: the chart has no engines over several nodes: leave it out, or run '
            "this fleet with Slurm or baton join"
        )
    try:
        if part.models:
            check(UpOptions(models=part.models, engine=part.engine, host_name=part.name, state_dir=""))
    except PlanRefused as error:
        raise WrongFleetFile(f'[[host]] "{part.name}" workers: {error}') from error


def _groups(part: HostPart, shared: Mapping[str, str]) -> Iterator[Group]:
    """The group of each worker of a host."""
    own = {
        name: value for name, value in part.of_workers.env.items() if shared.get(name) != value and name not in OF_HOSTS
    }
    options = UpOptions(models=part.models, engine=part.engine, state_dir="")
    ranks = sum(sum(each.gpu_counts) for each in part.models)
    for model in part.models:
        settings = {**worker_settings(options, model, {}), **own}
        del settings["WORKER_ENGINE"]
        for role in model.roles:
            yield _engine(part, model, role, settings, len(part.cores) * model.gpus_of(role) // ranks)
        of_store = {**settings, **model.store_settings}
        held = _gib(of_store.get("WORKER_STORE_MEMORY_BYTES", part.env.get("WORKER_STORE_MEMORY_BYTES", str(GIB))))
        for _ in range(model.store):
            yield Group(model.model, Role.STORE, _sorted(of_store), memory_gib=held)
        for server in model.attach:
            url, _, theirs = server.partition("=")
            attach = {"WORKER_ENGINE": "attached", "WORKER_ATTACH_URL": url, "WORKER_ATTACH_MODEL": theirs}
            yield Group(
                model.model,
                Role.BOTH,
                _sorted({**settings, **{name: value for name, value in attach.items() if value}}),
                key_file=model.attach_key_file,
            )


def _engine(part: HostPart, model: ModelOptions, role: Role, settings: Mapping[str, str], cores: int) -> Group:
    """A worker with an engine, on GPUs unless its host names cores."""
    ranks, stages = model.gpus_of(role), model.stages_of(role)
    parallel = ranks_in_stages(ranks, stages)
    if part.engine == "simulated":
        return Group(model.model, role, _sorted(settings))
    if not part.cores:
        of_stages = parallel if stages > 1 else {}  # The chart has one rank for each GPU.
        return Group(model.model, role, _sorted({**settings, **of_stages}), gpus=ranks)
    memory = _gib(str(model.kv_cache_bytes))
    return Group(model.model, role, _sorted({**settings, **parallel}), cpus=max(1, cores), memory_gib=memory)


def _waits(parts: Sequence[HostPart], settings: dict[str, str], found: Mapping[str, str]) -> dict[str, int]:
    """The longest that a host has, in whole seconds; taken out of the settings."""
    waits: dict[str, int] = {}
    for value, variable in found.items():
        settings.pop(variable, "")
        given = [part.env[variable] for part in parts if variable in part.env]
        try:
            waits |= {value: ceil(max(map(float, given)))} if given else {}
        except (ValueError, OverflowError) as error:
            raise WrongFleetFile(f"env {variable}: write seconds: {error}") from error
    return waits


def _sorted(settings: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(settings.items()))


def _gib(size: str) -> int:
    return ceil(int(size) / GIB) if size.isdecimal() else 0


def _named(groups: Iterable[Group]) -> dict[str, Group]:
    """Each group by a name that Kubernetes permits: its role, with the model where there are several."""
    ordered = list(groups)
    several = len({group.model for group in ordered}) > 1
    named: dict[str, Group] = {}
    for group in ordered:
        kind = "attached" if ("WORKER_ENGINE", "attached") in group.settings else group.role.value
        model = re.sub(r"[^a-z0-9]+", "-", group.model.lower().rpartition("/")[2]).strip("-")
        name = f"{model}-{kind}"[-NAME_CHARS_MAX:].strip("-") if several and model else kind
        number = next(n for n in range(1, len(ordered) + 2) if (f"{name}-{n}" if n > 1 else name) not in named)
        named[f"{name}-{number}" if number > 1 else name] = group
    return named


def _entry(name: str, group: Group, count: int) -> dict[str, Any]:
    """A group as the chart has it."""
    entry: dict[str, Any] = {"role": group.role.value, "replicas": count, "replicasMax": max(KEYS_MIN, 2 * count)}
    if group.gpus:
        entry["gpus"] = group.gpus
    if group.cpus:
        entry["cpu"] = str(group.cpus)
    if group.memory_gib:
        least, most = (STORE_GIB, STORE_GIB_MAX) if group.role is Role.STORE else (ENGINE_GIB, ENGINE_GIB_MAX)
        entry["memory"] = f"{least + group.memory_gib}Gi"
        entry["limits"] = {"memory": f"{most + group.memory_gib}Gi"}
    if group.key_file:
        entry["attachKeySecret"] = _key_secret(name)
    return {**entry, "settings": dict(group.settings)}
