"""The fleet of a plan as ``fleet.toml`` for ``baton up --config``."""

from __future__ import annotations

from collections.abc import Mapping

from replay.capacity.layouts import HOST_GPUS, Layout
from replay.split import LETTERS, Split


def fleet_toml(split: Split, layouts: Mapping[str, Layout]) -> str:
    """Hosts of ``HOST_GPUS`` GPUs with these workers, the largest first; empty where workers of a data parallel group
    do not fit on one. Names and addresses are examples.
    """
    roles = sorted((role for role in LETTERS.values() if getattr(split, role)), key=lambda role: -layouts[role].gpus)
    counts = {role: getattr(split, role) for role in roles}
    if any(one.data > 1 and one.tensor * one.pipeline > HOST_GPUS for one in (layouts[role] for role in counts)):
        return ""
    hosts: list[list[str]] = []
    free: list[tuple[int, list[tuple[str, int]]]] = []
    for role, count in counts.items():
        layout = layouts[role]
        if layout.gpus > HOST_GPUS:
            for _ in range(count):
                hosts += _spanned(role, layout, len(hosts))
            continue
        for _ in range(count):
            place = next((at for at, (room, _rows) in enumerate(free) if room >= layout.gpus), None)
            if place is None:
                place = len(free)
                free.append((HOST_GPUS, []))
            room, rows = free[place]
            free[place] = (room - layout.gpus, [*rows, (role, 1)])
    for _room, placed in free:
        names = [role for role, _one in placed]
        hosts.append([_row(role, layouts[role], names.count(role)) for role in dict.fromkeys(names)])
    experts = any(layouts[role].data > 1 for role in counts)
    return "\n".join([_model(experts), *(_host(number, rows) for number, rows in enumerate(hosts))])


def _spanned(role: str, layout: Layout, first: int) -> list[list[str]]:
    """The hosts of one worker or group that is larger than a host: those after the first have no rows of their own."""
    shared, each = (layout.gpus, 1) if layout.data == 1 else (layout.data, layout.tensor * layout.pipeline)
    equal = (hosts for hosts in range(1, shared + 1) if shared % hosts == 0)
    number = next(hosts for hosts in equal if shared // hosts * each <= HOST_GPUS)
    further = ", ".join(f'"{_name(first + more)}"' for more in range(1, number))
    gpus = each if layout.data > 1 else shared // number
    return [[_row(role, layout, 1, gpus, further)], *([] for _ in range(number - 1))]


def _row(role: str, layout: Layout, count: int, gpus: int = 0, further: str = "") -> str:
    gpus = gpus or layout.tensor * layout.pipeline
    values = {"count": count, "gpus_per_worker": gpus, "pipeline": layout.pipeline, "data_parallel": layout.data}
    written = [f'role = "{role}"', *(f"{key} = {value}" for key, value in values.items() if value > 1)]
    return "{ " + ", ".join(written + ([f"hosts = [{further}]"] if further else [])) + " }"


def _model(experts: bool) -> str:
    return '[[model]]\nname = "MODEL"\n' + ('engine_args = "--enable-expert-parallel"\n' if experts else "")


def _host(number: int, rows: list[str]) -> str:
    workers = "".join(f"  {row},\n" for row in rows)
    listed = f"workers = [\n{workers}]\n" if rows else ""
    return f'[[host]]\nname = "{_name(number)}"\naddress = "{_address(number)}"\n{listed}'


def _name(number: int) -> str:
    return f"gpu-{number + 1}"


def _address(number: int) -> str:
    return f"10.0.{(number + 1) // 256}.{(number + 1) % 256}"
