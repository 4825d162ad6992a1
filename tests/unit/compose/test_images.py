"""Which images the containers have: one version of NATS everywhere, and a script that pins all by digest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts.pin_images import main
from tests.support.nats_server import find_nats_server, free_port
from tests.support.processes import ROOT

DIGEST = "sha256:" + "ab" * 32
NATS = re.compile(r"\bnats(?:-server-bin==|:)(\d+\.\d+\.\d+)")
COMPOSE = """services:
  nats:
    image: nats:2.15.1-alpine
  otel:
    image: otel/collector:0.156.0
  router:
    image: baton-light:${BATON_TAG:-dev}
    build: {args: {BASE_IMAGE: "${BASE_IMAGE:-python:3.11-slim}"}}
"""


def test_one_version_of_nats_server_is_installed_contained_and_tested():
    files = [*ROOT.glob("compose*.yaml"), *(ROOT / "compose").rglob("*.yaml"), *(ROOT / "requirements").glob("*.txt")]
    files += [
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob(".ci/*"),
        *(ROOT / "tests").rglob("conftest.py"),
    ]
    named = {found for file in files if file.is_file() for found in NATS.findall(file.read_text())}
    installed = subprocess.run([find_nats_server(), "--version"], capture_output=True, text=True, check=True).stdout

    assert "nats:" in (ROOT / "compose.yaml").read_text()
    assert named == {installed.strip().rpartition("v")[2]}


class Registry(BaseHTTPRequestHandler):
    """Gives a token to anybody, and digests to who has it."""

    asked: list[str]

    def do_HEAD(self) -> None:
        known = self.headers.get("authorization") == "Bearer t"
        self.send_response(200 if known else 401)
        if known:
            self.server.asked.append(self.path)  # type: ignore[attr-defined]
            self.send_header("docker-content-digest", DIGEST)
        else:
            realm = f"http://127.0.0.1:{self.server.server_port}/token"  # type: ignore[attr-defined]
            self.send_header("www-authenticate", f'Bearer realm="{realm}",service="r",scope="pull"')
        self.end_headers()

    def do_GET(self) -> None:
        body = json.dumps({"token": "t"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Says nothing."""


@pytest.fixture
def registry() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def compose(tmp_path: Path) -> Path:
    file = tmp_path / "compose.yaml"
    file.write_text(COMPOSE)
    return file


def test_every_image_but_our_own_is_pinned_by_the_registrys_digest(registry, compose, monkeypatch):
    monkeypatch.setenv("BATON_REGISTRY", f"http://127.0.0.1:{registry.server_port}")

    assert main([str(compose)]) == 0
    once = compose.read_text()
    asked = list(registry.asked)
    assert main([str(compose)]) == 0

    assert once == COMPOSE.replace("2.15.1-alpine", f"2.15.1-alpine@{DIGEST}").replace(
        "0.156.0", f"0.156.0@{DIGEST}"
    ).replace("3.11-slim", f"3.11-slim@{DIGEST}")
    assert compose.read_text() == once
    assert registry.asked == asked, "a pinned image is asked for only with --renew"
    assert "/v2/library/nats/manifests/2.15.1-alpine" in asked
    assert "/v2/otel/collector/manifests/0.156.0" in asked


def test_without_a_registry_nothing_is_changed_and_that_is_said(compose):
    done = subprocess.run(
        [sys.executable, "-m", "scripts.pin_images", str(compose)],
        cwd=ROOT,
        env={"PATH": "", "BATON_REGISTRY": f"http://127.0.0.1:{free_port()}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1
    assert "Nothing was changed" in done.stderr
    assert "cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
    assert compose.read_text() == COMPOSE
