"""What a client is told beside its answer: who served it, and by what names to ask about it."""

from __future__ import annotations

from services.router.http.errors import NO_SNIFFING
from services.router.http.request import Header, header_value
from services.router.placement.placement import Placement
from services.router.placement.request_fields import Mode
from services.router.relay.request_context import RequestContext

FIXED_HEADERS_MAX = 4096
"""Combinations of workers whose headers are kept ready."""


class ServedBy:
    """Headers of answers. Those that are alike are made once."""

    def __init__(self) -> None:
        self._fixed: dict[tuple[Mode, str, str, str, bool], list[Header]] = {}

    def headers(self, flight: RequestContext, placed: Placement, content_type: str) -> list[Header]:
        """Of one answer."""
        prefill = placed.prefill.record.worker_id if placed.prefill is not None else ""
        key = (placed.mode, content_type, placed.decode.record.worker_id, prefill, placed.streamed)
        fixed = self._fixed.get(key)
        if fixed is None:
            if len(self._fixed) >= FIXED_HEADERS_MAX:
                self._fixed.clear()
            fixed = self._fixed[key] = _fixed_headers(*key)
        named = (b"x-request-id", flight.exchange.head.request_id.encode())
        return [*fixed, named, *flight.decision_headers()]


def _fixed_headers(mode: Mode, content_type: str, decode: str, prefill: str, streamed: bool) -> list[Header]:
    headers = [
        (b"content-type", header_value(content_type)),
        NO_SNIFFING,
        (b"x-baton-mode", mode.value.encode()),
        (b"x-baton-decode-worker", header_value(decode)),
    ]
    if prefill:
        headers.append((b"x-baton-prefill-worker", header_value(prefill)))
        headers.append((b"x-baton-handoff", b"streamed" if streamed else b"offered"))
    return headers
