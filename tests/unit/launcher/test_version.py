"""``baton --version``."""

from __future__ import annotations

import subprocess

from shared.runtime.service import baton_version
from tests.support.processes import ROOT
from tests.support.system import baton


def test_it_names_the_version_and_the_commit():
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()

    code, out, _err = baton("--version")

    assert code == 0
    assert out.strip().removesuffix("-dirty") == f"Baton {baton_version()}, commit {commit}"
