"""The console's worker cards: each combines the orchestrator's record with the worker's newest load report."""

from __future__ import annotations

from services.collector.console.views import WorkerCard
from services.collector.metrics.fleet_metrics import FleetMetrics, WorkerView
from shared.contracts.ids import WorkerId
from shared.contracts.load import LoadReport
from shared.contracts.workers import WITHOUT_ENGINE, FleetState, FleetWorker, WorkerPhase, WorkerRecord

SILENT_S_MIN = 3
"""Workers report at least once a second; a shorter gap does not count as silence."""
SHOWN_S = 60.0
"""A worker that is missing in the fleet state is shown for this long after its last report."""
DIGEST_CHARS = 12
OVER = (WorkerPhase.GONE, WorkerPhase.LOST)


class WorkerCards:
    """Builds the cards. Keeps the last fleet state's records, for times without an orchestrator."""

    def __init__(self) -> None:
        self._records: dict[WorkerId, WorkerRecord] = {}

    def update(self, state: FleetState) -> None:
        """Take a new fleet state."""
        self._records = {each.record.worker_id: each.record for each in state.workers}

    def model_names(self, cards: list[WorkerCard]) -> list[str]:
        """Models that the workers on these cards serve, sorted."""
        shown = {card.id for card in cards if card.phase not in OVER}
        records = [record for worker_id, record in self._records.items() if worker_id in shown]
        return sorted({name for record in records for name in record.models})

    def cards(self, metrics: FleetMetrics, now: float) -> list[WorkerCard]:
        """One card for each worker, sorted by id."""
        state = metrics.fleet.state
        listed = {each.record.worker_id: each for each in state.workers} if state is not None else {}
        heard = {worker_id for worker_id, view in metrics.workers.items() if now - view.heard < SHOWN_S}
        shown = sorted(heard | set(listed))
        return [self._card(each, listed.get(each), metrics.workers.get(each), now) for each in shown]

    def _card(self, worker_id: WorkerId, listed: FleetWorker | None, view: WorkerView | None, now: float) -> WorkerCard:
        record = listed.record if listed is not None else self._records.get(worker_id)
        if listed is not None and listed.phase in WITHOUT_ENGINE:
            view = None  # Of its engine before it slept or was restarted.
        load = view.load if view is not None else None
        silent_s = now - view.heard if view is not None else listed.silent_s if listed is not None else 0.0
        hits, prompt = (view.cached.per_second(now), view.prompt.per_second(now)) if view is not None else (0.0, 0.0)
        return WorkerCard(
            id=worker_id,
            role=_role(record, load),
            phase=_phase(listed, load, record),
            model=record.model if record is not None else "",
            engine=record.engine if record is not None else "",
            revision=record.fingerprint.revision if record is not None else "",
            host=record.host if record is not None else "",
            note=record.note if record is not None else "",
            running=load.running if load is not None else 0,
            waiting=load.waiting if load is not None else 0,
            waiting_tokens=load.waiting_tokens if load is not None else 0,
            legs=load.legs if load is not None else 0,
            kv_used=round(kv_used(load), 3),
            hit_ratio=round(min(1.0, hits / prompt), 3) if prompt > 0 else None,
            prompt_tokens_per_s=round(view.tokens_in.per_second(now), 1) if view is not None else 0.0,
            generation_tokens_per_s=round(view.tokens_out.per_second(now), 1) if view is not None else 0.0,
            heard_s_ago=int(silent_s) if silent_s >= SILENT_S_MIN else 0,
            adapters=adapter_texts(record),
        )


def kv_used(load: LoadReport | None) -> float:
    """0.0 to 1.0."""
    return load.kv_blocks_used / load.kv_blocks_total if load is not None and load.kv_blocks_total else 0.0


def adapter_texts(record: WorkerRecord | None) -> list[str]:
    """``sql (0a1b2c3d4e5f)``."""
    loaded = record.adapters if record is not None else []
    return [f"{adapter.name} ({adapter.digest[:DIGEST_CHARS]})" for adapter in loaded]


def _role(record: WorkerRecord | None, load: LoadReport | None) -> str:
    newest = load if load is not None and (record is None or load.epoch >= record.epoch) else record
    return newest.role.value if newest is not None else ""


def _phase(listed: FleetWorker | None, load: LoadReport | None, record: WorkerRecord | None) -> str:
    if listed is not None:
        return listed.phase.value
    newest = load if load is not None else record
    return newest.phase.value if newest is not None else ""
