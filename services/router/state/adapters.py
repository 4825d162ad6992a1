"""LoRA adapters of the workers: which names requests may use, and which workers have loaded the same files."""

from __future__ import annotations

from collections.abc import Mapping

from services.router.state import fleet_table as t
from shared.contracts.ids import WorkerId
from shared.contracts.workers import WorkerPhase, WorkerRecord

LOADING = (WorkerPhase.STARTING, WorkerPhase.PROBING, WorkerPhase.ASLEEP)
"""Phases in which a worker that was restarted, or sleeps, has not loaded its adapters yet."""


class AdapterHolders:
    """The workers that have each adapter, or had it when they were last seen. While these are away or start again, a
    request for the adapter may be tried again later; once they have unloaded it, the name is unknown.
    """

    def __init__(self) -> None:
        self._holders: dict[str, set[WorkerId]] = {}
        self._models: dict[str, str] = {}
        """The adapters' models."""

    def __contains__(self, name: object) -> bool:
        return name in self._holders

    def model_of(self, name: str) -> str:
        """The primary name of the adapter's model; empty when there is no such adapter."""
        return self._models.get(name, "")

    def record(self, record: WorkerRecord) -> None:
        """The newest record of a worker."""
        if record.phase in LOADING:
            return
        has = {adapter.name for adapter in record.adapters}
        for name in [name for name, holders in self._holders.items() if name not in has]:
            self._holders[name].discard(record.worker_id)
            if not self._holders[name]:
                del self._holders[name], self._models[name]
        for name in has:
            self._holders.setdefault(name, set()).add(record.worker_id)
            self._models[name] = record.model


def adapter_groups(groups: t.Ints, digests: Mapping[int, str]) -> t.Ints:
    """``groups`` (one number for each row), split further by the digests of the adapter's files on these rows. The
    first digest keeps the numbers, so that stores, which load no adapter, serve its workers.
    """
    numbers: dict[str, int] = {}
    for digest in digests.values():
        numbers.setdefault(digest, len(numbers))
    split = groups.copy()
    step = int(groups.max(initial=0)) + 1
    for row, digest in digests.items():
        split[row] += step * numbers[digest]
    return split
