"""`baton doctor` on a healthy system, without a system, and on a NATS that does not respond."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.nats_server import NatsServer
from tests.support.system import System, baton

pytestmark = pytest.mark.nats

SYSTEM = {"NATS", "Services", "Access"}


def test_a_healthy_system_has_no_errors(simulated: System):
    _code, out, err = baton("doctor", "--quick", "--json", "--state-dir", str(simulated.folder))

    told = json.loads(out)
    findings = told["findings"]
    # Of workers other tests may have put strangers beside them.
    assert [one for one in findings if one["area"] in SYSTEM and one["level"] == "error"] == [], err
    said = " | ".join(one["what"] for one in findings if one["level"] == "ok")
    for text in (
        "1 router ready",
        "1 orchestrator ready",
        "1 collector ready",
        " leads, term ",
        "requires no API keys",
        "listens on loopback only",
    ):
        assert text in said


def test_without_a_system_the_installation_is_checked(tmp_path: Path):
    code, out, _err = baton("doctor", "--quick", "--state-dir", str(tmp_path))

    assert "Installation" in out
    assert "No system runs; `baton up` starts one." in out.splitlines()[-1]
    assert code == (1 if "✗" in out else 0)


def test_a_silent_nats_is_reported_with_a_remedy(tmp_path: Path):
    with NatsServer(tmp_path) as server:
        server.pause()
        code, out, _err = baton("doctor", "--quick", "--state-dir", str(tmp_path), "--nats-url", server.url)
        server.resume()

    assert code == 1
    assert f"NATS at {server.url} does not respond." in out
    assert "→ Check the address" in out
