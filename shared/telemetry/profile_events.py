"""Legs as events of Chrome's trace format, which Perfetto and the profilers of torch use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

from shared.contracts.inference import LegKind
from shared.contracts.profiling import LegPart, ProfiledLeg

PARTS_LANE = 1000
"""The first thread id of the lanes with the parts of legs."""
Event = dict[str, Any]
T = TypeVar("T")


def leg_events(legs: Sequence[ProfiledLeg], *, pid: int, name: str, base_ns: int) -> Iterator[Event]:
    """The legs and their parts as a process ``name`` with this ``pid``. Slices that overlap are on different threads.
    ``base_ns``: the wall-clock time at which the trace's own begins.
    """
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    parts = list(chain.from_iterable(((leg, part) for part in leg.parts) for leg in legs))
    for tid, leg in lanes([(leg.began_ns, leg.ended_ns, leg) for leg in legs]):
        about = {"request_id": leg.request_id, "trace_id": leg.trace_id, "leg": leg.kind.value}
        yield _slice(f"{leg.kind.value} {leg.request_id}", leg.began_ns, leg.ended_ns, pid, tid, base_ns, about)
        if leg.first_token_ns:
            at = {"ts": _us(leg.first_token_ns, base_ns), "pid": pid, "tid": tid}
            yield {"ph": "i", "s": "t", "name": f"first token {leg.request_id}", **at, "args": about}
    spans: list[tuple[int, int, tuple[ProfiledLeg, LegPart]]] = [(p.began_ns, p.ended_ns, (leg, p)) for leg, p in parts]
    for tid, (leg, part) in lanes(spans):
        about = {"request_id": leg.request_id}
        yield _slice(
            f"{part.name} {leg.request_id}", part.began_ns, part.ended_ns, pid, PARTS_LANE + tid, base_ns, about
        )


def handoff_events(workers: Sequence[Sequence[ProfiledLeg]], *, base_ns: int) -> Iterator[Event]:
    """An arrow from each prefill leg's first token to the decode leg of its request. The processes are those that
    ``leg_events`` makes of the ``workers`` with the pids 1, 2, ...
    """
    prefills: dict[str, tuple[int, int, ProfiledLeg]] = {}
    decodes: list[tuple[int, int, ProfiledLeg]] = []
    for pid, legs in enumerate(workers, start=1):
        for tid, leg in lanes([(leg.began_ns, leg.ended_ns, leg) for leg in legs]):
            if leg.kind is LegKind.PREFILL:
                prefills[leg.request_id] = (pid, tid, leg)
            elif leg.kind is LegKind.DECODE:
                decodes.append((pid, tid, leg))
    for number, (pid, tid, decode) in enumerate(decodes, start=1):
        if (found := prefills.get(decode.request_id)) is None:
            continue
        from_pid, from_tid, prefill = found
        arrow = {"name": "handoff", "cat": "handoff", "id": number}
        began_ns, ended_ns = _inside(prefill), max(_inside(decode), _inside(prefill))
        yield {"ph": "s", **arrow, "pid": from_pid, "tid": from_tid, "ts": _us(began_ns, base_ns)}
        yield {"ph": "f", "bp": "e", **arrow, "pid": pid, "tid": tid, "ts": _us(ended_ns, base_ns)}


def lanes(spans: Sequence[tuple[int, int, T]]) -> Iterator[tuple[int, T]]:
    """Each thing with the number of its lane, from 1, in which nothing overlaps it."""
    ends: list[int] = []
    for began_ns, ended_ns, thing in sorted(spans, key=lambda span: span[:2]):
        free = next((lane for lane, end in enumerate(ends) if end <= began_ns), len(ends))
        ends[free : free + 1] = [ended_ns]
        yield free + 1, thing


def _inside(leg: ProfiledLeg) -> int:
    """When the leg's engine had the first token; an arrow must touch the slice of its leg."""
    return min(max(leg.first_token_ns or leg.ended_ns, leg.began_ns), leg.ended_ns)


def _slice(name: str, began_ns: int, ended_ns: int, pid: int, tid: int, base_ns: int, about: Event) -> Event:
    at = {"ts": _us(began_ns, base_ns), "dur": max(0, ended_ns - began_ns) / 1000}
    return {"ph": "X", "cat": "leg", "name": name, **at, "pid": pid, "tid": tid, "args": about}


def _us(at_ns: int, base_ns: int) -> float:
    return (at_ns - base_ns) / 1000
