"""Response headers of a served request: the workers that served it, and the ids to ask about it."""

from __future__ import annotations

from services.router.http.request import header_value
from services.router.placement.placement import Placement
from services.router.placement.request_fields import Mode
from services.router.relay.request_context import RequestContext
from shared.http.errors import NO_SNIFFING, Header

FIXED_HEADERS_MAX = 4096
"""Maximum number of cached combinations; the cache is cleared when it is full."""


class ResponseHeaders:
    """Makes response headers. Those that depend only on the workers are cached for each combination."""

    def __init__(self) -> None:
        self._fixed: dict[tuple[Mode, str, str, str, bool], list[Header]] = {}

    def of(self, context: RequestContext, placement: Placement, content_type: str) -> list[Header]:
        """The headers of one response."""
        prefill = placement.prefill.record.worker_id if placement.prefill is not None else ""
        key = (placement.mode, content_type, placement.decode.record.worker_id, prefill, placement.streamed)
        fixed = self._fixed.get(key)
        if fixed is None:
            if len(self._fixed) >= FIXED_HEADERS_MAX:
                self._fixed.clear()
            fixed = self._fixed[key] = _fixed_headers(*key)
        named = (b"x-request-id", context.http_request.head.request_id.encode())
        return [*fixed, named, *context.decision_headers()]


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
