"""`make setup`, as far as it needs no package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.support.processes import ROOT

MADE_S_MAX = 120.0


def test_an_environment_whose_making_was_interrupted_is_made_anew(tmp_path: Path):
    """Ctrl-C in the first seconds of `make up` leaves one without pip, in which nothing can be installed."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup.py", tmp_path / "scripts")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / ".venv")

    def run(*command: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(tmp_path / "scripts")}
        subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=MADE_S_MAX)

    run(sys.executable, "-c", "import setup; setup.make_venv('none')")
    run(str(tmp_path / ".venv/bin/python"), "-m", "pip", "--version")
