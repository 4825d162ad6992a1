"""The file in the state folder with the role that a worker changed to at run time. A restarted worker reads it; the
launcher removes it before it starts a new worker.
"""

from __future__ import annotations

from pathlib import Path


def saved_role_file(state_dir: str, worker_id: str) -> Path:
    """It exists only while the role differs from the role in the settings."""
    return Path(state_dir).expanduser() / "roles" / f"{worker_id}.json"
