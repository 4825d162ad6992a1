"""Messages for tests, with what does not matter filled in."""

from __future__ import annotations

from typing import Any

from shared.contracts.inference import LegKind, StartLeg
from shared.contracts.kv_events import KvEvent, KvEventBatch, KvEventKind, pack_hashes


def start_leg(leg_id: str = "leg-1", *, worker_id: str = "w1", router_id: str = "r1", **fields: Any) -> StartLeg:
    defaults: dict[str, Any] = {
        "request_id": "request-1",
        "kind": LegKind.AGGREGATED,
        "path": "/v1/completions",
        "body": b"{}",
        "deadline_s": 60.0,
    }
    return StartLeg(worker_id=worker_id, router_id=router_id, leg_id=leg_id, **{**defaults, **fields})


def kv_batch(seq: int, *hashes: int, worker_id: str = "w1", epoch: int = 1) -> KvEventBatch:
    stored = KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes(hashes))
    return KvEventBatch(worker_id=worker_id, epoch=epoch, seq=seq, events=[stored])
