"""Prometheus itself reads our configuration and runs our alerts. Needs promtool (Debian: apt-get install prometheus)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.observability.expressions import ROOT

PROMTOOL = shutil.which("promtool")
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="no promtool on this machine")


def promtool(*arguments: str) -> None:
    done = subprocess.run([PROMTOOL, *arguments], cwd=HERE, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_valid():
    promtool("check", "config", str(ROOT / "prometheus" / "prometheus.yaml"))


def test_each_alert_fires_when_it_should_and_only_then():
    promtool("test", "rules", "alerts_test.yaml")
