"""Which of the Pythons that Baton runs on are on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

MINORS = (11, 12, 13)


def pythons() -> list[Path]:
    """Programs that can make environments, one of each version, such as ``python3.11``: on the PATH or of pyenv."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[str, Path] = {}
    for name in (f"python3.{minor}" for minor in MINORS):
        for path in filter(None, [shutil.which(name), *sorted(map(str, kept.glob(f"*/bin/{name}")))]):
            # What is on the PATH may be a script that calls Python.
            command = [path, "-c", "import ensurepip, sys, venv; print(sys.executable)"]
            asked = subprocess.run(command, capture_output=True, text=True, check=False)
            if asked.returncode == 0:
                found.setdefault(name, Path(asked.stdout.strip()))
    return list(found.values())
