"""The console's table of batches."""

from __future__ import annotations

from typing import Any

from services.collector.console.tables import BATCHES_SHOWN_MAX, Batches
from shared.contracts.batches import BatchProgress, LineFault, StoredBatch


def batch(number: int, status: str = "in_progress", **fields: Any) -> StoredBatch:
    return StoredBatch(
        key=f"k{number}",
        id=f"batch_{number}",
        tenant="acme",
        api_key="",
        endpoint="/v1/completions",
        input_file_id="file-1",
        input=[],
        completion_window="24h",
        metadata=None,
        status=status,
        created_at=number,
        expires_at=number + 86_400,
        times={status: 1000 + number},
        **{"router_id": "r1", "total": 10, **fields},
    )


def test_batches_that_run_come_first_then_those_that_ended_last():
    batches = Batches()
    for one in (batch(1, "completed"), batch(2), batch(3, "failed"), batch(4)):
        batches.heard(one.key, one)
    assert [row.id for row in batches.table().rows] == ["batch_2", "batch_4", "batch_3", "batch_1"]
    batches.heard("k2", batch(2, "cancelled"))
    batches.heard("k4", None)
    assert [row.id for row in batches.table().rows] == ["batch_3", "batch_2", "batch_1"]


def test_a_row_tells_how_far_a_batch_is_and_why_it_failed():
    batches = Batches()
    running = batch(1, progress=BatchProgress(completed=3, failed=2))
    broken = batch(2, "failed", faults=[LineFault(code="invalid_json_line", message="not JSON", line=7)])
    for one in (running, broken):
        batches.heard(one.key, one)
    first, second = batches.table().rows
    assert (first.total, first.completed, first.failed, first.router, first.fault) == (10, 3, 2, "r1", "")
    assert (second.router, second.fault) == ("", "line 7: not JSON")


def test_the_table_is_bounded():
    batches = Batches()
    for number in range(BATCHES_SHOWN_MAX + 5):
        batches.heard(f"k{number}", batch(number))
    table = batches.table()
    assert (len(table.rows), table.more) == (BATCHES_SHOWN_MAX, 5)
