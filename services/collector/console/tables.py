"""The console's tables: workers, models, this month's tokens of API keys, and clients' batches.

A worker's card combines the orchestrator's record with the worker's newest load report. A model has its workers, and
its requests of the last minute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import nlargest
from typing import NamedTuple

from services.collector.console.traffic import MINUTE_S, counts_as_failure
from services.collector.console.views import BatchRow, BatchTable, KeyUsage, ModelRow, UsageTable, WorkerCard
from services.collector.metrics.fleet_metrics import MODELS_MAX, FleetMetrics, WorkerView
from services.collector.metrics.windows import Rate
from shared.contracts.batches import LineFault, StoredBatch
from shared.contracts.ids import WorkerId
from shared.contracts.inference import RequestFinished
from shared.contracts.load import LoadReport
from shared.contracts.usage import UsageCounts, UsageMonth
from shared.contracts.workers import WITHOUT_ENGINE, FleetWorker, WorkerPhase, WorkerRecord

SILENT_S_MIN = 3
"""Workers report at least once a second; a shorter gap does not count as silence."""
SHOWN_S = 60.0
"""A worker that is missing in the fleet state is shown for this long after its last report."""
DIGEST_CHARS = 12
OVER = (WorkerPhase.GONE, WorkerPhase.LOST)
READY = WorkerPhase.READY.value


def model_names(metrics: FleetMetrics, cards: list[WorkerCard]) -> list[str]:
    """Models that the workers on these cards serve, sorted."""
    shown = {card.id for card in cards if card.phase not in OVER}
    records = [record for worker_id, record in metrics.fleet.records.items() if worker_id in shown]
    return sorted({name for record in records for name in record.models})


def worker_cards(metrics: FleetMetrics, now: float) -> list[WorkerCard]:
    """One card for each worker, sorted by id."""
    state = metrics.fleet.state
    listed = {each.record.worker_id: each for each in state.workers} if state is not None else {}
    heard = {worker_id for worker_id, view in metrics.workers.items() if now - view.heard < SHOWN_S}
    shown = sorted(heard | set(listed))
    known = metrics.fleet.records
    return [_card(each, listed.get(each), known.get(each), metrics.workers.get(each), now) for each in shown]


def _card(
    worker_id: WorkerId, listed: FleetWorker | None, record: WorkerRecord | None, view: WorkerView | None, now: float
) -> WorkerCard:
    if listed is not None and listed.phase in WITHOUT_ENGINE:
        view = None  # Of its engine before it slept or was restarted.
    load = view.load if view is not None else None
    silent_s = now - view.heard if view is not None else listed.silent_s if listed is not None else 0.0
    if listed is not None and listed.phase in {*WITHOUT_ENGINE, WorkerPhase.GONE}:
        silent_s = 0.0  # Engines report; without one, a worker only renews its record, which expires with it.
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
        kv_used=round(load.kv_used, 3) if load is not None else 0.0,
        hit_ratio=round(min(1.0, hits / prompt), 3) if prompt > 0 else None,
        prompt_tokens_per_s=round(view.tokens_in.per_second(now), 1) if view is not None else 0.0,
        generation_tokens_per_s=round(view.tokens_out.per_second(now), 1) if view is not None else 0.0,
        heard_s_ago=int(silent_s) if silent_s >= SILENT_S_MIN else 0,
        adapters=adapter_texts(record),
    )


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


class ModelTraffic:
    """One model's last minute."""

    __slots__ = ("failed", "requests", "tokens_in", "tokens_out", "ttft_s", "ttfts")

    def __init__(self, now: float) -> None:
        self.requests, self.failed, self.tokens_in, self.tokens_out = (Rate(now, MINUTE_S) for _ in range(4))
        self.ttft_s, self.ttfts = (Rate(now, MINUTE_S) for _ in range(2))
        """Sum and number of the known times to the first token; without lines of batches, for which no user waits."""

    def add(self, request: RequestFinished, now: float) -> None:
        self.requests.add(1, now)
        self.tokens_in.add(max(0, request.prompt_tokens), now)
        self.tokens_out.add(max(0, request.completion_tokens), now)
        if counts_as_failure(request):
            self.failed.add(1, now)
        if request.ttft_s >= 0.0 and not request.is_batch:
            self.ttft_s.add(request.ttft_s, now)
            self.ttfts.add(1, now)

    def mean_ttft_s(self, now: float) -> float | None:
        """None without a request that had a first token."""
        count = self.ttfts.per_second(now)
        return round(self.ttft_s.per_second(now) / count, 4) if count else None


class Models:
    """Models that have workers. Clients can name others; those are not shown."""

    def __init__(self) -> None:
        self._models: dict[str, ModelTraffic] = {}

    def add(self, request: RequestFinished, now: float) -> None:
        if (traffic := self._models.get(request.model)) is not None:
            traffic.add(request, now)

    def update(self, cards: Iterable[WorkerCard], now: float) -> None:
        """Follow the models of these workers, and forget the others."""
        names = sorted({card.model for card in cards if card.model})[:MODELS_MAX]
        self._models = {name: self._models.get(name) or ModelTraffic(now) for name in names}

    def rows(self, cards: Iterable[WorkerCard], now: float) -> list[ModelRow]:
        """One row for each model, sorted by name."""
        ready = Counter((card.model, card.role) for card in cards if card.phase == READY)
        return [
            _row(name, {role: count for (model, role), count in sorted(ready.items()) if model == name}, traffic, now)
            for name, traffic in self._models.items()
        ]


def _row(model: str, ready: dict[str, int], traffic: ModelTraffic, now: float) -> ModelRow:
    return ModelRow(
        model=model,
        ready=ready,
        requests_per_s=round(traffic.requests.per_second(now), 2),
        tokens_in_per_s=round(traffic.tokens_in.per_second(now), 1),
        tokens_out_per_s=round(traffic.tokens_out.per_second(now), 1),
        failed_per_s=round(traffic.failed.per_second(now), 2),
        ttft_s=traffic.mean_ttft_s(now),
    )


KEYS_SHOWN_MAX = 50
"""Keys that are shown: those with the most tokens."""


class KeyMonth(NamedTuple):
    """What one key used of one model in one month."""

    entry: UsageMonth
    total: UsageCounts
    key_tokens: int
    """Tokens of the key, with all models."""


class MonthUsage:
    """What each API key used of each model in one month, from the entries that the usage ledger holds in memory."""

    def __init__(self) -> None:
        self._month = ""
        self._entries: dict[str, tuple[UsageMonth, UsageCounts]] = {}
        """Entries of the month and later ones, with their sums."""
        self._largest: list[KeyMonth] | None = None
        """The entries with the most tokens; None: must be found anew."""
        self._more = 0
        """Entries of the month that are not among the largest."""
        self._table: UsageTable | None = None
        """Table of the largest entries; None: must be made anew."""

    def heard(self, name: str, entry: UsageMonth | None) -> None:
        """An entry of the ledger has changed; None: it is gone."""
        if entry is None:
            if self._entries.pop(name, None) is not None:
                self._largest = None
        elif entry.month >= self._month:
            self._entries[name] = (entry, entry.total)
            self._largest = None

    def table(self, month: str) -> UsageTable:
        """The table of this month in UTC; earlier months are forgotten."""
        largest = self.largest(month)
        if self._table is None:
            self._table = UsageTable(month=month, rows=[_key_usage(*each) for each in largest], more=self._more)
        return self._table

    def largest(self, month: str) -> list[KeyMonth]:
        """The keys and models of this month in UTC with the most tokens; earlier months are forgotten."""
        if month != self._month:
            self._month, self._largest = month, None
            self._entries = {name: known for name, known in self._entries.items() if known[0].month >= month}
        if self._largest is None:
            self._largest, self._table = self._found(), None
        return self._largest

    def _found(self) -> list[KeyMonth]:
        present = [known for known in self._entries.values() if known[0].month == self._month]
        used: dict[tuple[str, str], int] = {}
        for entry, total in present:
            who = (entry.tenant, entry.key)
            used[who] = used.get(who, 0) + total.tokens
        largest = nlargest(KEYS_SHOWN_MAX, present, key=lambda known: known[1].tokens)
        self._more = len(present) - len(largest)
        return [KeyMonth(entry, total, used[entry.tenant, entry.key]) for entry, total in largest]


def _key_usage(entry: UsageMonth, total: UsageCounts, used: int) -> KeyUsage:
    prompt, budget = total.prompt_tokens, entry.monthly_tokens
    return KeyUsage(
        tenant=entry.tenant,
        key=entry.key,
        model=entry.model,
        requests=total.requests,
        failed=total.failed,
        prompt_tokens=prompt,
        cached_ratio=round(total.cached_tokens / prompt, 3) if prompt else None,
        completion_tokens=total.completion_tokens,
        engine_s=round(total.prefill_s + total.decode_s, 3),
        budget_tokens=budget or None,
        budget_used=round(used / budget, 3) if budget else None,
    )


BATCHES_SHOWN_MAX = 30
BATCHES_MAX = 20_000


class Batches:
    """All batches that routers keep, as far as there is room: those that run, then those that ended last."""

    def __init__(self) -> None:
        self._known: dict[str, BatchRow] = {}
        self._ended_at: dict[str, int] = {}
        """Ends of the batches that have ended, in seconds since 1970."""
        self._table: BatchTable | None = None
        """None: must be made anew."""

    def heard(self, key: str, batch: StoredBatch | None) -> None:
        """A batch has changed; None: it is gone."""
        self._table = None
        if batch is None:
            self._known.pop(key, None)
            self._ended_at.pop(key, None)
        elif key in self._known or len(self._known) < BATCHES_MAX:
            self._known[key] = _batch_row(batch)
            if batch.has_ended:
                self._ended_at[key] = batch.times.get(batch.status, batch.created_at)

    def table(self) -> BatchTable:
        if self._table is None:
            running = [key for key in self._known if key not in self._ended_at]
            running.sort(key=lambda key: self._known[key].created_at)
            ended = sorted(self._ended_at, key=lambda key: self._ended_at[key], reverse=True)
            keys = [*running, *ended]
            rows = [self._known[key] for key in keys[:BATCHES_SHOWN_MAX]]
            self._table = BatchTable(rows=rows, more=len(keys) - len(rows))
        return self._table


def _batch_row(batch: StoredBatch) -> BatchRow:
    return BatchRow(
        id=batch.id,
        tenant=batch.tenant,
        status=batch.status,
        created_at=batch.created_at,
        total=batch.total,
        completed=batch.progress.completed,
        failed=batch.progress.failed,
        router="" if batch.has_ended else batch.router_id,
        fault=_text(batch.faults[0]) if batch.faults else "",
    )


def _text(fault: LineFault) -> str:
    return f"line {fault.line}: {fault.message}" if fault.line is not None else fault.message
