"""The webhook scaler: what is posted, and how replies are read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from services.orchestrator.planner.planning import WebhookScaler
from shared.contracts.planning import FleetScaled, ScaleFleet
from shared.contracts.workers import Role
from tests.support.nats_server import free_port

ORDER = ScaleFleet(model="m", revision="r2", role=Role.DECODE, change=2, why="decode is full")
REPLY_S_MAX = 10.0
POLL_S = 0.02


@contextmanager
def endpoint(status: int, body: bytes) -> Iterator[tuple[str, list[dict]]]:
    """Its URL, and what was posted to it."""
    posted: list[dict] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_text: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/scale", posted
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_the_order_is_posted_and_an_empty_reply_accepts_it():
    with endpoint(204, b"") as (url, posted):
        assert await WebhookScaler(url, REPLY_S_MAX).scale(ORDER) == FleetScaled(change=2)

    assert posted == [{"model": "m", "revision": "r2", "role": "decode", "change": 2, "why": "decode is full"}]


@pytest.mark.parametrize(
    ("status", "body", "change", "text"),
    [
        (200, b'{"change": 1, "refusal": "quota"}', 1, "quota"),
        (409, b"not now", 0, "replies 409: not now"),
        (200, b"<html>", 0, "no FleetScaled"),
        (200, b'{"change": "many"}', 0, "no FleetScaled"),
    ],
)
async def test_a_webhook_may_do_less_or_nothing(status: int, body: bytes, change: int, text: str):
    with endpoint(status, body) as (url, _posted):
        scaled = await WebhookScaler(url, REPLY_S_MAX).scale(ORDER)

    assert scaled.change == change
    assert text in scaled.refusal


async def test_an_unreachable_webhook_is_a_refusal():
    scaled = await WebhookScaler(f"http://127.0.0.1:{free_port()}/", REPLY_S_MAX).scale(ORDER)

    assert scaled.change == 0
    assert "cannot be reached" in scaled.refusal
