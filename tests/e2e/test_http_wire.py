"""The edge's own HTTP: requests over raw sockets are answered in order, or refused."""

from __future__ import annotations

import json
import re
import socket
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.system import System, until

pytestmark = pytest.mark.nats

ANSWER_S_MAX = 60.0
EXAMPLES = 150


def connect(system: System) -> socket.socket:
    return socket.create_connection(("127.0.0.1", system.port), timeout=ANSWER_S_MAX)


def body_of(**fields) -> bytes:
    return json.dumps({"model": "baton-tiny", "prompt": "Run!", "max_tokens": 2, "ignore_eos": True, **fields}).encode()


def request(body: bytes, *headers: str, version: str = "1.1", path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "host: test", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def read_to_end(connection: socket.socket) -> bytes:
    """Everything until the server closes. Raises TimeoutError if it does not."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def exchange(system: System, *pieces: bytes) -> bytes:
    with closing(connect(system)) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return read_to_end(connection)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer)]


def test_pipelined_requests_are_answered_in_their_order(simulated: System):
    asked = [("first", 300), ("second", 1), ("third", 50)]
    requests = [request(body_of(max_tokens=tokens), f"x-request-id: {name}") for name, tokens in asked]

    answer = exchange(simulated, b"".join(requests) + request(b"", "connection: close", path="/v1/nothing"))

    assert statuses(answer) == [200, 200, 200, 404]
    assert re.findall(rb"x-request-id: (\w+)", answer) == [b"first", b"second", b"third"]


def test_a_request_that_comes_in_single_bytes_is_served(simulated: System):
    whole = request(body_of(), "connection: close")

    answer = exchange(simulated, *(whole[at : at + 1] for at in range(len(whole))))

    assert statuses(answer) == [200]


def test_a_body_in_chunks_is_served(simulated: System):
    body = body_of()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:10], body[10:])]

    assert statuses(exchange(simulated, head, *chunks, b"0\r\n\r\n")) == [200]


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_is_answered_without_chunks_and_closed(simulated: System, stream: bool):
    answer = exchange(simulated, request(body_of(stream=stream), version="1.0"))

    assert statuses(answer) == [200]
    assert b"transfer-encoding" not in answer
    assert (b"data: [DONE]\n\n" in answer) is stream


def test_expect_100_continue_gets_its_interim_response(simulated: System):
    body = body_of()
    with closing(connect(simulated)) as connection:
        connection.sendall(request(body, "expect: 100-continue", "connection: close")[: -len(body)])
        told = connection.recv(1024)
        connection.sendall(body)
        answer = read_to_end(connection)

    assert statuses(told) == [100]
    assert statuses(answer) == [200]


@pytest.mark.parametrize(
    "wrong",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        request(b"{}", "content-length: 7"),
        request(b"{}", "transfer-encoding: chunked"),
        b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: test\r\nx: " + b"y" * 200_000,
        b"POST /" + b"v" * 200_000,
    ],
    ids=lambda wrong: wrong[-20:].decode(errors="replace"),
)
def test_what_is_no_http_is_refused_and_the_connection_closed(simulated: System, wrong: bytes):
    try:
        answer = exchange(simulated, wrong)
    except (ConnectionResetError, BrokenPipeError):  # closed while we still wrote
        return

    assert statuses(answer)[0] in {400, 413, 431}


def test_a_client_that_disconnects_during_its_body_leaves_no_state(simulated: System):
    for _ in range(20):
        with closing(connect(simulated)) as connection:
            connection.sendall(request(body_of())[:-10])

    until(lambda: simulated.metrics().sum("baton_router_requests_in_flight") == 0, "nothing is in flight")
    simulated.until_idle()


def test_the_router_stays_healthy_after_arbitrary_bytes(simulated: System):
    (router,) = simulated.pids("services.router")
    good = request(body_of(max_tokens=1))
    cut = st.builds(lambda at, extra: good[:at] + extra + good[at:], st.integers(0, len(good)), st.binary(max_size=40))

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.one_of(st.binary(max_size=400), cut))
    def survives(sent: bytes) -> None:
        with closing(connect(simulated)) as connection:
            try:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                read_to_end(connection)
            except (ConnectionResetError, BrokenPipeError):
                pass

    survives()

    assert simulated.pids("services.router") == [router]
    assert simulated.http.post("/v1/completions", content=body_of()).status_code == 200
    until(lambda: simulated.metrics().sum("baton_router_requests_in_flight") == 0, "nothing is in flight")
    assert "Traceback" not in (simulated.logs / "router.log").read_text()
