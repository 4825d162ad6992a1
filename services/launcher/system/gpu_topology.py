"""Which GPUs of a machine are near each other, from ``nvidia-smi topo -m``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

FAR = 1000
"""Between GPUs of which nothing is known."""
DISTANCES = {"PIX": 200, "PXB": 300, "PHB": 400, "NODE": 500, "SYS": 600, "SOC": 600}
"""nvidia-smi's words for the way between two GPUs, from one PCIe bridge to the link between CPU sockets; ``SOC`` is
the older word for ``SYS``.
"""
NVLINK = re.compile(r"NV(\d+)")
NVLINKS_MAX = 100
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""nvidia-smi underlines the table's head, also in a pipe."""
GPU = re.compile(r"GPU(\d+)")

Topology = Mapping[tuple[str, str], int]
"""Distance of two GPUs by their indexes; more NVLinks are nearer than fewer, and these nearer than PCIe."""


def parse_topology(text: str) -> dict[tuple[str, str], int]:
    """Distances between GPUs. Other devices of the table, such as network cards, are left out, and so is what does not
    look like a row.
    """
    lines = [words for line in text.splitlines() if (words := ESCAPES.sub("", line).split())]
    columns = [found[1] for word in (lines[0] if lines else []) if (found := GPU.fullmatch(word))]
    distances: dict[tuple[str, str], int] = {}
    for line in lines[1:]:
        row = GPU.fullmatch(line[0])
        if row and len(line) > len(columns):  # The columns of the GPUs come first.
            distances |= {(row[1], column): _distance(word) for column, word in zip(columns, line[1:], strict=False)}
    return distances


def _distance(word: str) -> int:
    if word == "X":
        return 0
    if found := NVLINK.fullmatch(word):
        return NVLINKS_MAX - min(int(found[1]), NVLINKS_MAX - 1)
    return DISTANCES.get(word, FAR)


def nearest(gpus: Sequence[str], count: int, topology: Topology) -> tuple[str, ...]:
    """So many of these GPUs, whose greatest distance is smallest; of equal choices the first ones.

    Grows a set from each GPU, which is exact where nearness is transitive, as behind bridges, sockets and NVSwitch.
    """
    sets = [_grown(seed, gpus, count, topology) for seed in gpus]
    best = min(sets, key=lambda chosen: _spread(chosen, topology))
    return tuple(sorted(best, key=gpus.index))


def _grown(seed: str, gpus: Sequence[str], count: int, topology: Topology) -> list[str]:
    chosen = [seed]
    while len(chosen) < count:
        rest = [gpu for gpu in gpus if gpu not in chosen]
        chosen.append(min(rest, key=lambda gpu: _spread([*chosen, gpu], topology)))
    return chosen


def _spread(chosen: Sequence[str], topology: Topology) -> tuple[int, int]:
    """The greatest distance, and the sum of all."""
    distances = [topology.get((one, other), FAR) for index, one in enumerate(chosen) for other in chosen[index + 1 :]]
    return max(distances, default=0), sum(distances)
