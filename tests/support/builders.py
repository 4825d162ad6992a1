"""Messages for tests, with what does not matter filled in."""

from __future__ import annotations

from typing import Any

from services.router.request.client import ApiClient
from services.router.request.head import Head
from services.router.request.rate_limit import RateLimit
from shared.contracts.api_keys import NO_KEY, Key
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


def request_head(
    *, key: Key = NO_KEY, tenant: str = "", class_name: str = "", is_batch: bool = False, path: str = "/v1/completions"
) -> Head:
    """The head of a client's request, with Baton's headers and the client's key."""
    head = Head(path, [], lambda: "request-1")
    head.client = ApiClient(key, b"", RateLimit(key, 0.0))
    head.tenant, head.class_name, head.is_batch = tenant, class_name, is_batch
    return head
