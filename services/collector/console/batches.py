"""The console's table of batches: those that run, then those that ended last."""

from __future__ import annotations

from services.collector.console.views import BatchRow, BatchTable
from shared.contracts.batches import StoredBatch

ROWS_MAX = 30
KNOWN_MAX = 20_000


class Batches:
    """All batches that routers keep, as far as there is room."""

    def __init__(self) -> None:
        self._known: dict[str, BatchRow] = {}
        self._ended_at: dict[str, int] = {}
        """Of those that have ended, in seconds since 1970."""
        self._table: BatchTable | None = None
        """None: must be made anew."""

    def heard(self, key: str, batch: StoredBatch | None) -> None:
        """A batch has changed; None: it is gone."""
        self._table = None
        if batch is None:
            self._known.pop(key, None)
            self._ended_at.pop(key, None)
        elif key in self._known or len(self._known) < KNOWN_MAX:
            self._known[key] = _row(batch)
            if batch.has_ended:
                self._ended_at[key] = batch.times.get(batch.status, batch.created_at)

    def table(self) -> BatchTable:
        """What the page shows."""
        if self._table is None:
            running = [key for key in self._known if key not in self._ended_at]
            running.sort(key=lambda key: self._known[key].created_at)
            ended = sorted(self._ended_at, key=lambda key: self._ended_at[key], reverse=True)
            keys = [*running, *ended]
            rows = [self._known[key] for key in keys[:ROWS_MAX]]
            self._table = BatchTable(rows=rows, more=len(keys) - len(rows))
        return self._table


def _row(batch: StoredBatch) -> BatchRow:
    return BatchRow(
        id=batch.id,
        tenant=batch.tenant,
        status=batch.status,
        created_at=batch.created_at,
        total=batch.total,
        completed=batch.progress.completed,
        failed=batch.progress.failed,
        router="" if batch.has_ended else batch.router_id,
        fault=batch.faults[0].message if batch.faults else "",
    )
