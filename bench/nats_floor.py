"""Lower bound of NATS: round trips from one core to an echo on another, with raw sockets on both ends.

``python -m bench.nats_floor --url nats://HOST:PORT --rate 200`` prints one line of JSON, milliseconds. A request with two legs costs at
least two of these.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Event

ROUND_TRIPS = 1000
WARM_UP = 50
READ_BYTES = 65536
ANSWER_S_MAX = 5.0


def connect(url: str, subject: str) -> socket.socket:
    """A connection that is subscribed to ``subject``."""
    host, _, port = url.removeprefix("nats://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=ANSWER_S_MAX)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(b'CONNECT {"verbose":false}\r\nSUB ' + subject.encode() + b" 1\r\nPING\r\n")
    read_to(connection, b"PONG\r\n")
    return connection


def read_to(connection: socket.socket, end: bytes) -> None:
    """Read until what came ends like this."""
    tail = b""
    while not tail.endswith(end):
        tail = (tail + connection.recv(READ_BYTES))[-len(end) :]


def echo(url: str, core: int, ready: Event) -> None:
    """Answer each message, until the connection is closed."""
    os.sched_setaffinity(0, {core})
    connection = connect(url, "floor.there")
    connection.settimeout(None)
    ready.set()
    while connection.recv(READ_BYTES):
        connection.sendall(b"PUB floor.back 5\r\nhello\r\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--echo-core", type=int, default=1)
    arguments = parser.parse_args()
    context = get_context("spawn")
    ready = context.Event()
    answering = context.Process(target=echo, args=(arguments.url, arguments.echo_core, ready), daemon=True)
    answering.start()
    if not ready.wait(30.0):
        raise RuntimeError("the echo did not start")
    connection = connect(arguments.url, "floor.back")
    times = []
    for _ in range(ROUND_TRIPS):
        begun = time.perf_counter()
        connection.sendall(b"PUB floor.there 5\r\nhello\r\n")
        read_to(connection, b"hello\r\n")
        times.append(time.perf_counter() - begun)
        time.sleep(1.0 / arguments.rate)
    answering.terminate()
    answering.join()
    times = sorted(times[WARM_UP:])
    print(json.dumps({"p50": statistics.median(times) * 1e3, "p99": times[int(0.99 * len(times))] * 1e3}))


if __name__ == "__main__":
    main()
