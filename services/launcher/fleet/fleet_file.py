"""A fleet file: hosts, the workers of each, and the settings that they share, in TOML.

Every error names the table and the key; an unknown key is an error, with the known one that is most like it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from services.launcher.system.options import ModelOptions, Span, parse_bytes
from shared.contracts.ids import is_subject_token
from shared.contracts.workers import Role
from shared.text.formats import choices_of

FOR_SERVICES = ("ROUTER_", "COLLECTOR_", "ORCHESTRATOR_")
FOR_WORKERS = ("BATON_", "WORKER_", "VLLM_", "HF_", "UCX_", "NIXL_", "NCCL_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_")
"""Prefixes of the variables that a fleet may set. Others, such as PATH or PYTHONPATH, belong to the host."""
OWN = ("BATON_NATS_URL", "BATON_NATS_NKEY_FILE", "BATON_NATS_CA_FILE", "BATON_STATE_DIR")
"""Variables that Baton sets itself."""


class HostPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers of one host, with the devices that they may use: from a fleet file or from a token."""

    name: str
    """Name of the host: the ids of its workers begin with it, so that no two hosts have a worker of one id."""
    models: tuple[ModelOptions, ...] = ()
    engine: Literal["vllm", "simulated"] = "vllm"
    address: str = ""
    """Address at which other hosts reach this one; empty: that of its connection to NATS."""
    gpus: tuple[str, ...] = ()
    """GPU indexes as nvidia-smi shows them; empty: all."""
    cores: tuple[int, ...] = ()
    """Logical CPUs; empty: all."""
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Variables of the processes of this host; those of its environment take precedence."""

    @property
    def of_workers(self) -> HostPart:
        """Without the variables of services: what a host that joins needs."""
        kept = {name: value for name, value in self.env.items() if name.startswith(FOR_WORKERS)}
        return msgspec.structs.replace(self, env=kept)


def unusable_variable(name: str) -> str:
    """Why a fleet cannot set this variable; empty if it can."""
    if name in OWN:
        return "Baton sets it itself; leave it out"
    if name.startswith(FOR_SERVICES + FOR_WORKERS):
        return ""
    return f"a fleet sets variables that begin with {', '.join(FOR_SERVICES + FOR_WORKERS)}; others belong to the host"


S = TypeVar("S")
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Some = Annotated[int, msgspec.Meta(ge=1, le=1024)]
HOSTS_MAX = 1024
WHOLE_ENGINES = {Role.PREFILL, Role.DECODE, Role.BOTH}


class WrongFleetFile(Exception):
    """The file does not describe a fleet; the message names the table, the key and the correction."""


class NatsTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[nats]``"""

    port: Port = 4222


class RouterTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[router]``"""

    host: str = ""
    """Address of the OpenAI API; empty: that of the head host."""
    port: Port = 8000
    count: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


class CollectorTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[collector]``"""

    host: str = "127.0.0.1"
    port: Port = 8001


class ModelTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[[model]]``"""

    name: str
    aliases: tuple[str, ...] = ()
    kv_cache: str = ""
    """Size of the KV cache of each worker, such as ``8G``."""
    connector: Literal["baton", "upstream", ""] = ""
    kv_backend: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_]{0,32}$")] = ""
    """NIXL's plug-in that moves KV between its workers, such as ``LIBFABRIC``; empty: UCX."""
    engine_args: str = ""


class WorkersTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[[host.workers]]``"""

    role: Role | None = None
    """None for a worker without an engine, for the server of ``attach``."""
    attach: str = ""
    """A server outside of Baton: ``URL`` or ``URL=MODEL``, the model's name there."""
    attach_key_file: str = ""
    """File on this host with the API key for that server."""
    model: str = ""
    """Name of the model; empty: the only one of the fleet."""
    count: Some = 1
    memory: str = ""
    """Memory of all stores of this row together, such as ``64G``."""
    objects: str = ""
    """Bucket below the files of the stores of this row, ``http(s)://host/bucket``."""
    gpus_per_worker: Some = 1
    """GPUs of each worker, one for each pipeline stage at least."""
    pipeline: Some = 1
    """Pipeline stages of each worker, over which its GPUs are shared out equally."""
    data_parallel: Some = 1
    """Workers of each data parallel group. ``count`` is of groups then."""
    hosts: tuple[str, ...] = ()
    """Further hosts. Each has ``gpus_per_worker`` GPUs of each of these workers, or where they form data parallel
    groups an equal part of the workers of each group.
    """


class HostTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[[host]]``"""

    name: str
    address: str = ""
    """Address at which other hosts reach it; the head host needs one."""
    head: bool = False
    """The head host runs NATS, routers, orchestrator and collector. Unless a host says so, the first one is it."""
    gpus: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    workers: tuple[WorkersTable, ...] = ()
    env: Mapping[str, str | int | float | bool] = msgspec.field(default_factory=dict)


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole file."""

    engine: Literal["vllm", "simulated"] = "vllm"
    nats: NatsTable = NatsTable()
    router: RouterTable = RouterTable()
    collector: CollectorTable = CollectorTable()
    env: Mapping[str, str | int | float | bool] = msgspec.field(default_factory=dict)
    """Variables of all hosts."""
    model: tuple[ModelTable, ...] = ()
    host: tuple[HostTable, ...]

    @property
    def head(self) -> HostTable:
        """The host with NATS and the services."""
        return next((host for host in self.host if host.head), self.host[0])

    def named(self, name: str) -> HostTable:
        """That host. Raises WrongFleetFile, which lists the hosts."""
        if found := next((host for host in self.host if host.name == name), None):
            return found
        raise WrongFleetFile(f"no host has the name {name!r}; name one with --name: {_listed(self.host)}")


def read_fleet_file(text: str, head_address: str = "") -> Fleet:
    """The fleet. ``head_address`` replaces the file's address of the head host. Raises WrongFleetFile."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WrongFleetFile(f"it is not valid TOML: {error}") from error
    _check_tables(raw)
    fleet = _converted(raw, Fleet, "")
    if head_address:
        fleet = _with_head_at(fleet, head_address)
    _check_hosts(fleet)
    _check_models(fleet)
    return fleet


def _with_head_at(fleet: Fleet, address: str) -> Fleet:
    head = fleet.head if fleet.host else None
    hosts = (msgspec.structs.replace(each, address=address) if each is head else each for each in fleet.host)
    return msgspec.structs.replace(fleet, host=tuple(hosts))


def part_of(fleet: Fleet, name: str) -> HostPart:
    """What that host runs. Raises WrongFleetFile."""
    host = fleet.named(name)
    where = _title("host", 0, {"name": name})
    used = dict.fromkeys(_model_of(fleet, row, where) for row, _span in _rows_of(fleet, host))
    given = {**fleet.env, **host.env}
    return HostPart(
        name=name,
        models=tuple(_model_options(fleet, host, model) for model in used),
        engine=fleet.engine,
        address=host.address,
        gpus=tuple(map(str, host.gpus)),
        cores=host.cores,
        env={key: _variable_text(value) for key, value in given.items()},
    )


def _model_options(fleet: Fleet, host: HostTable, model: str) -> ModelOptions:
    where = _title("host", 0, {"name": host.name})
    table = next((each for each in fleet.model if each.name == model), ModelTable(name=model))
    parts = [(row, span) for row, span in _rows_of(fleet, host) if _model_of(fleet, row, where) == model]
    of_model = [row for row, _span in parts]
    rows = {row.role: row for row in of_model if row.role is not None}
    count = {role: rows[role].count if role in rows else 0 for role in Role}
    gpus = {role: rows[role].gpus_per_worker if role in rows else 1 for role in WHOLE_ENGINES}
    group = {role: rows[role].data_parallel if role in rows else 1 for role in WHOLE_ENGINES}
    stages = {role: rows[role].pipeline if role in rows else 1 for role in WHOLE_ENGINES}
    return ModelOptions(
        model=model,
        aliases=table.aliases,
        prefill=count[Role.PREFILL],
        decode=count[Role.DECODE],
        both=count[Role.BOTH],
        store=count[Role.STORE],
        host_memory_bytes=next((parse_bytes(row.memory) for row in of_model if row.memory), 0),
        object_store=next((row.objects for row in of_model if row.objects), ""),
        attach=tuple(row.attach for row in of_model if row.attach for _ in range(row.count)),
        attach_key_file=next((row.attach_key_file for row in of_model if row.attach_key_file), ""),
        connector=table.connector,
        kv_backend=table.kv_backend,
        kv_cache_bytes=parse_bytes(table.kv_cache) if table.kv_cache else 0,
        engine_args=table.engine_args,
        gpus_per_worker=gpus[Role.BOTH],
        gpus_per_prefill=gpus[Role.PREFILL],
        gpus_per_decode=gpus[Role.DECODE],
        pipeline=stages[Role.BOTH],
        pipeline_prefill=stages[Role.PREFILL],
        pipeline_decode=stages[Role.DECODE],
        data_parallel=group[Role.BOTH],
        data_parallel_prefill=group[Role.PREFILL],
        data_parallel_decode=group[Role.DECODE],
        spans={row.role: span for row, span in parts if span is not None and row.role is not None},
    )


FIRST_MEETING_PORT = 9700
"""Where the hosts of the fleet's first engine that has several meet: below the ports that engines choose themselves."""


def _rows_of(fleet: Fleet, host: HostTable) -> Iterator[tuple[WorkersTable, Span | None]]:
    """The workers of the host, and those of others that have a part of their engines on it."""
    port = FIRST_MEETING_PORT
    for other in fleet.host:
        for row in other.workers:
            hosts = [other.name, *row.hosts]
            if host.name in hosts:
                node = hosts.index(host.name)
                span = Span(nodes=len(hosts), node=node, address=other.address, port=port)
                yield row, span if row.hosts else None
            port += row.count if row.hosts else 0


def _model_of(fleet: Fleet, row: WorkersTable, where: str) -> str:
    if row.model or not fleet.model:
        return row.model
    if len(fleet.model) > 1:
        raise WrongFleetFile(f"{where} workers: model is missing; name one of {_listed(fleet.model)}")
    return fleet.model[0].name


def _check_hosts(fleet: Fleet) -> None:
    if not 1 <= len(fleet.host) <= HOSTS_MAX:
        raise WrongFleetFile(f"[[host]]: {len(fleet.host)} hosts; write 1 to {HOSTS_MAX}")
    _check_unique(fleet.host, "host")
    if len([host for host in fleet.host if host.head]) > 1:
        raise WrongFleetFile("[[host]] head: only one host can be the head host")
    for host in fleet.host:
        where = _title("host", 0, {"name": host.name})
        if not is_subject_token(host.name):
            raise WrongFleetFile(f"{where} name: write letters, digits, '-' and '_'")
        if host.gpus and host.cores:
            raise WrongFleetFile(f"{where} cores: workers run on gpus or on cores; leave one out")
    if len(fleet.host) > 1 and not fleet.head.address:
        where = _title("host", 0, {"name": fleet.head.name})
        raise WrongFleetFile(f"{where} address is missing: the other hosts must reach NATS on the head host")


def _check_models(fleet: Fleet) -> None:
    _check_unique(fleet.model, "model")
    for table in fleet.model:
        try:
            parse_bytes(table.kv_cache or "0")
        except ValueError as error:
            raise WrongFleetFile(f"{_title('model', 0, {'name': table.name})} kv_cache: {error}") from error
    known = [table.name for table in fleet.model]
    roles: dict[str, set[Role]] = {}
    for host in fleet.host:
        where = _title("host", 0, {"name": host.name})
        here = [(_model_of(fleet, row, where), row.role) for row, _span in _rows_of(fleet, host)]
        for row in host.workers:
            _check_row(row, _model_of(fleet, row, where), f"{where} workers: ")
            _check_span(fleet, host, row, f"{where} workers: ")
        _check_key_files(fleet, host, where)
        for model, role in here:
            if known and model not in known:
                raise WrongFleetFile(f"{where} workers: {_unknown(model, known, 'a model of this file')}")
            if role is not None and here.count((model, role)) > 1:
                twice = f"role {role.value!r} occurs twice for one model, here or among another host's further hosts"
                raise WrongFleetFile(f"{where} workers: {twice}; use count")
            roles.setdefault(model, set()).add(role or Role.BOTH)
    if not roles:
        raise WrongFleetFile("[[host]] workers: no host has workers")
    for model, found in roles.items():
        if Role.BOTH not in found and not {Role.PREFILL, Role.DECODE} <= found:
            missing = Role.DECODE if Role.PREFILL in found else Role.PREFILL
            raise WrongFleetFile(f"workers of {model or 'the model'}: none of the fleet would {missing.value}")


def _check_row(row: WorkersTable, model: str, where: str) -> None:
    if row.memory and row.role is not Role.STORE:
        raise WrongFleetFile(f'{where}memory is the size of stores; leave it out, or write role = "store"')
    if row.objects and row.role is not Role.STORE:
        raise WrongFleetFile(f'{where}objects are of stores; leave it out, or write role = "store"')
    try:
        parse_bytes(row.memory or "0")
    except ValueError as error:
        raise WrongFleetFile(f"{where}memory: {error}") from error
    if (row.role is None) == (not row.attach):
        raise WrongFleetFile(f"{where}write either role, or attach with the URL of a server outside of Baton")
    if not row.attach:
        if row.attach_key_file:
            raise WrongFleetFile(f"{where}attach_key_file has the key for a server; attach is missing")
        return
    if not row.attach.startswith(("http://", "https://")):
        raise WrongFleetFile(f"{where}attach: write it as http://HOST:PORT or http://HOST:PORT=MODEL")
    if not model:
        raise WrongFleetFile(f"{where}model is missing: clients ask for the server's model by this name")
    if row.attach_key_file and not row.attach_key_file.startswith("/"):
        raise WrongFleetFile(f"{where}attach_key_file: write an absolute path, on that host")


def _check_span(fleet: Fleet, host: HostTable, row: WorkersTable, where: str) -> None:
    if not row.hosts:
        return
    if row.role not in WHOLE_ENGINES:
        raise WrongFleetFile(f"{where}hosts: only engines have ranks on several hosts; leave it out")
    if row.data_parallel > 1 and row.data_parallel % (1 + len(row.hosts)):
        raise WrongFleetFile(
            f"{where}data_parallel: {row.data_parallel} workers of a group cannot be shared out equally over "
            f"{1 + len(row.hosts)} hosts; write a multiple"
        )
    known = [each.name for each in fleet.host]
    for name in row.hosts:
        if name not in known:
            raise WrongFleetFile(f"{where}hosts: {_unknown(name, known, 'a host of this file')}")
    if host.name in row.hosts or len(set(row.hosts)) < len(row.hosts):
        raise WrongFleetFile(f"{where}hosts: name each further host once, and not {host.name!r} itself")
    try:
        is_ip = not ip_address(host.address).is_unspecified
    except ValueError:
        is_ip = False
    if not is_ip:
        raise WrongFleetFile(
            f"{where}hosts: the others meet {host.name!r} at its address; give it one, such as 10.0.0.2"
        )


def _check_key_files(fleet: Fleet, host: HostTable, where: str) -> None:
    """The workers of one model and host share the setting."""
    of_model: dict[str, set[str]] = {}
    for row in host.workers:
        if row.attach:
            of_model.setdefault(_model_of(fleet, row, where), set()).add(row.attach_key_file)
    if more := next((model for model, files in of_model.items() if len(files) > 1), None):
        raise WrongFleetFile(f"{where} workers: all servers of {more!r} on one host have one attach_key_file, or none")


def _check_unique(tables: Sequence[HostTable] | Sequence[ModelTable], key: str) -> None:
    names = [each.name for each in tables]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise WrongFleetFile(f"[[{key}]] name: {twice[0]!r} occurs twice")


def _check_tables(raw: Mapping[str, Any]) -> None:
    """Each table by itself, so that an error can name it."""
    _check_keys(raw, Fleet, "")
    for key, table in (("nats", NatsTable), ("router", RouterTable), ("collector", CollectorTable)):
        _converted(_table(raw.get(key, {}), f"[{key}]"), table, f"[{key}] ")
    for number, model in enumerate(_tables(raw.get("model", []), "[[model]]"), 1):
        _converted(model, ModelTable, f"{_title('model', number, model)} ")
    _check_variables(raw.get("env", {}), "[env]")
    for number, host in enumerate(_tables(raw.get("host", []), "[[host]]"), 1):
        where = _title("host", number, host)
        _check_keys(host, HostTable, f"{where} ")
        _check_variables(host.get("env", {}), f"{where} env")
        for row in _tables(host.get("workers", []), f"{where} workers"):
            _converted(row, WorkersTable, f"{where} workers: ")
        _converted({**host, "workers": []}, HostTable, f"{where} ")


def _check_variables(raw: object, where: str) -> None:
    for name, value in _table(raw, where).items():
        if why := unusable_variable(name):
            raise WrongFleetFile(f"{where} {name}: {why}")
        if not isinstance(value, str | int | float | bool):
            raise WrongFleetFile(f"{where} {name}: write a text, a number, true or false")


def _converted(raw: object, kind: type[S], where: str) -> S:
    _check_keys(_table(raw, where), kind, where)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        if missing := re.search(r"missing required field `(\w+)`", text):
            raise WrongFleetFile(f"{where}{missing[1]} is missing") from error
        if wrong := re.fullmatch(r"(.*) - at `\$\.?(.*)`", text):
            if chosen := re.fullmatch("Invalid enum value '(.*)'", wrong[1]):
                what = f"a value of {wrong[2]}"
                raise WrongFleetFile(f"{where}{_unknown(chosen[1], choices_of(kind, wrong[2]), what)}") from error
            raise WrongFleetFile(f"{where}{wrong[2].partition('[')[0]}: {wrong[1]}") from error
        raise WrongFleetFile(f"{where}{text}") from error


def _check_keys(raw: Mapping[str, Any], kind: type, where: str) -> None:
    known = [field.name for field in msgspec.structs.fields(kind)]
    for name in raw:
        if name not in known:
            raise WrongFleetFile(f"{where}{_unknown(name, known, 'a key here')}")


def _unknown(name: str, known: list[str], what: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"{name!r} is not {what}; " + (f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}")


def _table(raw: object, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise WrongFleetFile(f"{where.strip()} must be a table")
    return raw


def _tables(raw: object, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(raw, list):
        raise WrongFleetFile(f"{where} must be a list of tables")
    return [_table(each, where) for each in raw]


def _title(key: str, number: int, table: Mapping[str, Any]) -> str:
    return f"[[{key}]] {table['name']!r}" if isinstance(table.get("name"), str) else f"[[{key}]] number {number}"


def _listed(tables: Sequence[HostTable] | Sequence[ModelTable]) -> str:
    return ", ".join(each.name for each in tables)


def _variable_text(value: str | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
