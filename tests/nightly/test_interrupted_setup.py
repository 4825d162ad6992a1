"""`make setup` after one that was interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from tests.integration.test_setup import MADE_S_MAX, checkout

__all__ = ("checkout",)


def test_an_environment_whose_making_was_interrupted_is_made_anew(checkout: Path):
    """Ctrl-C in the first seconds of `make up` leaves one without pip, in which nothing can be installed."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(checkout / ".venv")

    def run(*command: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(checkout / "scripts")}
        subprocess.run(command, cwd=checkout, env=env, check=True, timeout=MADE_S_MAX)

    run(sys.executable, "-c", "import setup; setup.make_venv('none')")
    run(str(checkout / ".venv/bin/python"), "-m", "pip", "--version")
