"""A real server that speaks S3, with an empty bucket ``blocks``: moto, in an environment of its own."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from obstore.store import S3Store

from tests.support.nats_server import free_port
from tests.support.processes import ROOT

PYTHON = ROOT / ".venv-s3/bin/python"
HAS_SERVER = (PYTHON.parents[1] / "installed.txt").is_file()
pytestmark = [pytest.mark.skipif(not HAS_SERVER, reason="the S3 server is not installed here: make s3-server")]

KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
START_S_MAX, POLL_S = 30.0, 0.1


@dataclass
class Server:
    process: subprocess.Popen
    url: str

    def bucket(self) -> S3Store:
        return S3Store(
            "blocks",
            prefix="s1",
            endpoint=self.url,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    port = free_port()
    command = [PYTHON, "-m", "moto.server", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S_MAX
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
                    connection.sendall(
                        b"PUT /blocks HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
                    assert b" 200 " in connection.recv(4096)
                    break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(POLL_S)
        yield Server(process, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()
