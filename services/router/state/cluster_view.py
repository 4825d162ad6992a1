"""The workers as the router knows them: their records, their load reports, and what was sent to them since."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from services.router.state import fleet_table as t
from services.router.state.block_table import Depths
from services.router.state.revision_names import ANY, means
from services.router.state.worker_speed import WorkerSpeed
from services.router.state.worker_view import Sent, WorkerView, can_exchange_kv
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import WorkerLoad
from shared.contracts.workers import HashScheme, Role, WorkerPhase, WorkerRecord

SHORT_MAX: Final = 64
"""Workers with too little free KV for a request of which the running prompts are compared with its own."""
NOTED_FROM: Final = 0.5
"""The share of a worker's KV in use from which the prompts of its legs are noted."""
LOADING: Final = (WorkerPhase.STARTING, WorkerPhase.PROBING, WorkerPhase.ASLEEP)
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


DEFAULT_SPEED: Final = WorkerSpeed()


class ClusterView:
    """All workers, and all models that were ever registered. ``table`` has the numbers for placement."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, WorkerView] = {}
        self.models_known: dict[str, None] = {}
        self.is_whole = True
        """Whether the registry was read to its end: then a model that no worker here offers does not exist."""
        self.table = t.FleetTable()
        self.views: list[WorkerView | None] = []
        """Views of the workers by row."""
        self.has_attached = False
        """Whether workers may lack endpoints that all engines have: those attached to servers outside of Baton."""
        self.away: set[WorkerId] = set()
        """Workers that were ready, and have not reported since a bus outage."""
        self._bus_back_at = -math.inf
        """When a bus outage ended; infinite while it lasts."""
        self._masks: dict[tuple[str, str], t.Bools] = {}
        """Masks of the workers' rows by model and revision."""
        self._boundaries: dict[str, HashScheme | None] = {}
        """Results of ``boundaries`` by model."""
        self._primary_names: dict[str, str] = {}
        """Primary names of models by alias."""
        self._adapter_holders = AdapterHolders()
        self._adapter_groups: dict[str, t.Ints] = {}
        """Groups by adapter; see ``groups``."""
        self._groups: dict[str, int] = {}
        self._choices_made = 0

    def record(self, record: WorkerRecord, now: float) -> bool:
        """A worker's record in the registry. A new epoch begins with an empty view. Returns whether it says
        anything new: mostly a worker has only renewed it.
        """
        view = self.workers.get(record.worker_id)
        if view is not None and record == view.record:
            view.registered = True
            view.heard_at = max(view.heard_at, now)
            self.table.set(view.row, t.HEARD_AT, view.heard_at)
            return False
        self.models_known.update(dict.fromkeys(record.models))
        if view is not None and record.epoch < view.record.epoch:
            return True
        known = view is not None and view.record.epoch == record.epoch and view.pairs_with == record.fingerprint.key()
        if view is None or record.epoch > view.record.epoch:
            self._remove(view)
            self.away.discard(record.worker_id)
            view = self.workers[record.worker_id] = WorkerView(record, self._row(), now)
            self.views[view.row] = view
        else:
            view.renew(record)
            view.registered = True
            view.heard_at = max(view.heard_at, now)
        self._adapter_holders.record(record)
        self._forget_names()
        self._write(view)
        if not known:
            self.table.set_speed(view.row, DEFAULT_SPEED)
        return True

    def unregister(self, worker_id: WorkerId) -> None:
        """The registry entry expired. A worker that still reports stays: the registry may be at fault."""
        view = self.workers.get(worker_id)
        if view is not None:
            view.registered = False

    def report(self, load: WorkerLoad, now: float, evictions: tuple[int, int] = (0, 0)) -> bool:
        """A load report. A worker that counted as lost is back. Returns whether its role has changed.

        ``evictions``: see ``PrefixIndex.evictions``.
        """
        view = self.workers.get(load.worker_id)
        if view is None or load.epoch != view.record.epoch:
            return False
        view.report(load)
        view.heard_at = now
        view.lost = view.away = False
        self.away.discard(load.worker_id)
        view.own.reported(now)
        prompts_per_s = view.prompts.update(load.computed_tokens_total, now)
        evicted, restored = evictions
        # Ten times a second for each worker: only what a report changes.
        view.write_report(self.table, prompts_per_s, evicted, restored)
        if view.record.role is not load.role:
            view.record = msgspec.structs.replace(view.record, role=load.role)
            self._write(view)
            return True
        self._set_ready(view)
        return False

    def _set_ready(self, view: WorkerView) -> None:
        """Write the flag, if it has changed: numpy takes longer than the comparison."""
        ready = view.ready
        if ready is not view.written_ready:
            view.written_ready = ready
            self.table.flags[t.READY, view.row] = ready

    def disconnected(self) -> None:
        """The bus is down: each worker must report again before it gets legs."""
        for worker_id, view in self.workers.items():
            if view.ready:  # A starting worker has not reported before.
                self.away.add(worker_id)
            view.away = True
            self._write(view)

    def reconnected(self, now: float) -> None:
        """The bus is back. Workers have been silent since now: before, they could not be heard."""
        self._bus_back_at = now

    def unheard(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """NATS has nobody to deliver a leg for this worker to: it must report again before it gets legs."""
        view = self.workers.get(worker_id)
        if view is not None and view.record.epoch <= epoch:
            view.away = True
            self._write(view)

    @property
    def is_heard(self) -> bool:
        """Whether the fleet is known: the registry was read, and all workers that were ready have reported since a bus
        outage.
        """
        return not self.away and self.is_whole and len(self.workers) > 0

    def is_away(self, model: str) -> bool:
        """Whether the model may have more workers than are known to be ready: the registry was not read yet, or they
        have not reported since a bus outage.
        """
        if not self.is_whole:
            return True
        return bool(self.away) and any(view.record.worker_id in self.away for view in self.offering(model))

    def set_speed(self, worker_id: WorkerId, speed: WorkerSpeed) -> None:
        """Write how fast a worker is, for placement."""
        view = self.workers.get(worker_id)
        if view is not None:
            self.table.set_speed(view.row, speed)

    def set_transit(self, worker_id: WorkerId, transit_s: float) -> None:
        """Write the one part of its speed that changes with each leg."""
        view = self.workers.get(worker_id)
        if view is not None:
            self.table.set(view.row, t.TRANSIT_S, transit_s)

    def lose(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """The orchestrator has declared this epoch lost."""
        view = self.workers.get(worker_id)
        if view is not None and view.record.epoch <= epoch:
            view.lost = True
            self._write(view)

    def sweep(self, now: float, silent_s_max: float) -> list[WorkerRecord]:
        """Drop workers that are neither registered nor heard; returns their records."""
        gone = [
            view
            for view in self.workers.values()
            if not view.registered and (view.lost or now - self._silent_from(view) > silent_s_max)
        ]
        for view in gone:
            del self.workers[view.record.worker_id]
            self.away.discard(view.record.worker_id)
            self._remove(view)
        if gone:
            self._forget_names()
            alive = {view.pairs_with for view in self.workers.values()}
            self._groups = {key: group for key, group in self._groups.items() if key in alive}
        return [view.record for view in gone]

    def _silent_from(self, view: WorkerView) -> float:
        return max(view.heard_at, self._bus_back_at) if view.away else view.heard_at

    def offering(self, model: str) -> Iterable[WorkerView]:
        """Workers of a model; of any model when ``model`` is empty."""
        if not model:
            return self.workers.values()
        return [view for view in self.workers.values() if view.offers(model)]

    def not_serving(self, path: str, model: str) -> frozenset[WorkerId] | None:
        """The workers of a model whose engines do not serve this path; None when that is so of all."""
        views = [view for view in self.offering(model) if view.serves]
        lacking = {view.record.worker_id for view in views if view.record.paths and path not in view.record.paths}
        return None if views and len(lacking) == len(views) else frozenset(lacking)

    def without_threshold(self, model: str) -> frozenset[WorkerId] | None:
        """The workers of a model that cannot refuse a request by what is cached; None when that is so of all. A worker
        that starts may turn out to be able.
        """
        views = [view for view in self.offering(model) if view.serves]
        lacking = {
            view.record.worker_id
            for view in views
            if view.record.fingerprint.connector and not can_exchange_kv(view.record)
        }
        return None if views and len(lacking) == len(views) else frozenset(lacking)

    def model_of(self, name: str) -> str:
        """The model that a request means by the name of a model or of an adapter; empty when it is unknown."""
        return name if name in self.models_known else self._adapter_holders.model_of(name)

    def knows(self, model: str) -> bool:
        """Whether a worker has ever offered the model, or the last worker with this adapter may come back with it."""
        return model in self.models_known or model in self._adapter_holders

    def primary_name(self, name: str) -> str:
        """The primary name of the model that has this alias, if all workers of the model know the alias and no other
        model has it; else the name itself.
        """
        if name not in self.models_known:
            return name
        primary = self._primary_names.get(name)
        if primary is None:
            primaries = {view.record.model for view in self.offering(name)}
            primary = primaries.pop() if len(primaries) == 1 else name
            if not all(name in view.record.models for view in self.offering(primary)):
                primary = name
            self._primary_names[name] = primary
        return primary

    def models(self) -> set[str]:
        """The primary names of all models that have workers."""
        return {view.record.model for view in self.workers.values()}

    def mask(self, model: str, revision: str = ANY) -> t.Bools:
        """Rows that offer a model in a revision; any model when ``model`` is empty."""
        if model and not self.knows(model):
            return np.zeros(self.table.count, dtype=np.bool_)  # not cached: clients can make up any number of names
        mask = self._masks.get((model, revision))
        if mask is None or len(mask) != self.table.count:
            mask = np.zeros(self.table.count, dtype=np.bool_)
            offering = self.offering(model)
            mask[[view.row for view in offering if means(revision, view.record.fingerprint.revision)]] = True
            self._masks[model, revision] = mask
        return mask

    def boundaries(self, model: str) -> HashScheme | None:
        """How a model's blocks are hashed, if it has boundaries; None for a model of full attention alone."""
        if model in self._boundaries:
            return self._boundaries[model]
        if model and not self.knows(model):
            return None  # As for masks.
        schemes = [view.record.hashing for view in self.offering(model) if view.record.hashing.boundaries]
        self._boundaries[model] = found = schemes[0] if schemes else None
        return found

    def groups(self, model: str) -> t.Ints:
        """For each row, its group: workers of a group may exchange the KV of requests for ``model``. Workers of an
        adapter's group have loaded the same files.
        """
        if model not in self._adapter_holders:
            return self.table.groups
        groups = self._adapter_groups.get(model)
        if groups is None or len(groups) != len(self.table.groups):
            groups = adapter_groups(
                self.table.groups, {view.row: view.digest_of(model) for view in self.offering(model)}
            )
            self._adapter_groups[model] = groups
        return groups

    def in_use(self, hashes: Sequence[int], room: int) -> Depths:
        """For each row whose free KV is less than ``room`` tokens, how many of these blocks, from the first, noted
        legs hold there. Of many such rows, only those with most free KV are looked at.
        """
        free = self.table.numbers[t.FREE_TOKENS, : self.table.count]
        short = np.flatnonzero(free < room)
        found: Depths = np.zeros(self.table.count, dtype=np.int32)
        for row in short[np.argsort(-free[short], kind="stable")][:SHORT_MAX].tolist():
            view = self.views[row]
            if view is not None:
                found[row] = view.own.prompts.shared(hashes)
        return found

    def shared_tokens(self, worker_id: WorkerId, hashes: Sequence[int]) -> int:
        """Tokens of a prompt with these block hashes that noted legs hold on that worker."""
        view = self.workers.get(worker_id)
        return 0 if view is None else view.own.prompts.shared(hashes) * view.record.hashing.block_size

    def picked(self, *views: WorkerView) -> None:
        """Note that these workers were chosen, so that equal workers take turns."""
        self._choices_made += 1
        for view in views:
            self.table.set(view.row, t.LAST_CHOSEN, self._choices_made)

    def leg_started(self, worker_id: WorkerId, sent: Sent) -> None:
        """The router itself sent a leg. Its prompt is noted where KV may become short."""
        view = self.workers.get(worker_id)
        if view is not None:
            sent.epoch = view.record.epoch
            if view.kv_used < NOTED_FROM:
                sent.hashes = ()
            view.own.started(sent)
            view.write_load(self.table)

    def others_started(self, worker_id: WorkerId, epoch: Epoch, sent: Sent) -> None:
        """Another router sent legs."""
        view = self.workers.get(worker_id)
        if view is not None and view.record.epoch == epoch:
            view.own.others_started(sent)
            view.write_load(self.table)

    def prompt_computed(self, worker_id: WorkerId, sent: Sent, tokens: int) -> None:
        """A leg of this router has computed its prompt of ``tokens``."""
        view = self.workers.get(worker_id)
        if view is not None and view.record.epoch == sent.epoch:
            view.own.computed(sent, tokens)
            view.write_load(self.table)

    def leg_ended(self, worker_id: WorkerId, sent: Sent, context_tokens: int, legs: int = 1, tokens: int = 0) -> None:
        """A leg of this router has ended or failed; it counted as ``legs``. ``tokens``: of its prompt, unless
        ``prompt_computed`` has counted them.
        """
        view = self.workers.get(worker_id)
        if view is not None and view.record.epoch == sent.epoch:
            view.own.ended(sent, context_tokens, legs, tokens)
            view.write_load(self.table)

    def _forget_names(self) -> None:
        """Which workers a name stands for has changed."""
        self.has_attached = any(view.record.attached for view in self.workers.values())
        self._masks.clear()
        self._boundaries.clear()
        self._primary_names.clear()
        self._adapter_groups.clear()

    def _row(self) -> int:
        row = self.table.take()
        if row == len(self.views):
            self.views.append(None)
        return row

    def _remove(self, view: WorkerView | None) -> None:
        if view is not None:
            self.views[view.row] = None
            self.table.give_back(view.row)

    def _group(self, fingerprint: str) -> int:
        if fingerprint not in self._groups:
            self._groups[fingerprint] = max(self._groups.values(), default=-1) + 1
        return self._groups[fingerprint]

    def _write(self, view: WorkerView) -> None:
        record, row, flags = view.record, view.row, self.table.flags
        flags[t.READY, row] = view.written_ready = view.ready
        flags[t.SERVES, row] = view.serves
        flags[t.PREFILLS, row] = view.serves and record.role is not Role.DECODE
        flags[t.DECODES, row] = view.serves and record.role is not Role.PREFILL
        flags[t.EXCHANGES_KV, row] = can_exchange_kv(record)
        flags[t.ATTACHED, row] = record.attached
        self.table.groups[row] = self._group(view.pairs_with)
        numbers = self.table.numbers
        numbers[t.HEARD_AT, row] = view.heard_at
        numbers[t.LEGS_MAX, row] = record.legs_max
        hashing = record.hashing
        numbers[t.BLOCK_SIZE, row] = max(1, hashing.block_size)
        # Of a prompt of full blocks the last one is handed over, but no boundary is at its end.
        numbers[t.HANDED_OVER_MIN, row] = (
            hashing.align + max(1, hashing.beyond) if hashing.boundaries else max(1, hashing.block_size)
        )
        # The index knows what follows a boundary, and takes no boundary for held without it.
        numbers[t.DROPPED_TOKENS, row] = 0 if hashing.boundaries else hashing.dropped
        numbers[t.STEP_TOKENS, row] = max(1, record.step_tokens_max)
        numbers[t.ANSWERS, row] = view.serves and record.role is not Role.PREFILL
        view.write_load(self.table)
