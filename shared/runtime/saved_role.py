"""Where a worker keeps a role that it took on at run time, in the state folder: its next life looks there, and whoever
starts a worker anew, rather than again, removes it before.
"""

from __future__ import annotations

from pathlib import Path


def saved_role_file(state_dir: str, worker_id: str) -> Path:
    """There is one only while the role is another than that of the settings."""
    return Path(state_dir).expanduser() / "roles" / f"{worker_id}.json"
