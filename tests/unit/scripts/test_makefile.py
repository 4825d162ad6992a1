"""The Makefile's own variables: the set-up gets them, services, which refuse unknown ones, do not."""

from __future__ import annotations

import os
import subprocess

from tests.support.processes import ROOT

CHOSEN = {"BATON_PYTHON": "/a/python", "BATON_ENGINE": "none"}
RUN_S_MAX = 60.0


def made(*arguments: str) -> list[str]:
    """What ``make`` prints where these are in its environment."""
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, env={**os.environ, **CHOSEN}, capture_output=True, text=True,
        timeout=RUN_S_MAX, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_the_choice_of_python_reaches_the_set_up():
    assert "BATON_ENGINE='none' BATON_PYTHON='/a/python' scripts/setup.sh --dev" in made("-n", "test")


def test_the_choice_of_python_reaches_no_service():
    variables = made("--eval", "show: ; @env", "show")

    assert any(line.startswith("PATH=") for line in variables)
    assert not [line for line in variables if line.partition("=")[0] in CHOSEN]
