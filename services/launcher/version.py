"""What ``baton --version`` says."""

from __future__ import annotations

import subprocess

from shared import compiled
from shared.runtime.service import baton_version

GIT_S_MAX = 10.0


def version_line() -> str:
    return f"Baton {baton_version() or 'of an unknown version'}, commit {commit() or 'unknown'}"


def commit() -> str:
    """The commit of the installed package, which the build wrote down (scripts/build_backend.py), or of the checkout;
    ``-dirty`` at its end says that files differ from it. Empty if it is not known.
    """
    built = compiled.ROOT / "commit.txt"
    if built.is_file():
        return built.read_text()
    if not (compiled.ROOT / ".git").exists():
        return ""
    command = ("git", "-C", str(compiled.ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S_MAX, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
