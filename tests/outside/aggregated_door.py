"""A second address of a Baton system, whose requests are not disaggregated: for clients that talk to one of its engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

ANSWER_S_MAX = 300.0
HEADERS = {"content-type": "application/json", "x-baton-mode": "aggregated"}


@contextmanager
def aggregated_door(url: str) -> Iterator[int]:
    """The port on the loopback address. Answers are relayed whole, not streamed."""

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._relay("GET", b"")

        def do_POST(self) -> None:
            self._relay("POST", self.rfile.read(int(self.headers["content-length"])))

        def _relay(self, method: str, body: bytes) -> None:
            address = f"{url}{self.path}"
            answer = httpx.request(
                method, address, content=body, headers=HEADERS, timeout=ANSWER_S_MAX, trust_env=False
            )
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers.get("content-type", "application/json"))
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_arguments: object) -> None:
            """The suite's log has the client's view."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        thread = threading.Thread(target=server.serve_forever, name="aggregated-door")
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
