"""Files in the state folder that outlive a worker's process.

One says why its engine was refused at start: the worker removes it at its next successful start, and `baton doctor`
reads it when the process has ended. The other has the role that a worker changed to at run time: a restarted worker
reads it, and the launcher removes it before it starts a new worker.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger("baton.worker")

FOLDER = "refused"


def save_refusal(state_dir: str, worker_id: str, reason: str) -> None:
    """A folder that is not writable costs the finding of `baton doctor`; the log has the reason too."""
    file = _folder(state_dir) / worker_id
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(reason, encoding="utf-8")
    except OSError as error:
        log.warning("the refusal cannot be saved: %s", error)


def forget_refusal(state_dir: str, worker_id: str) -> None:
    """The worker's engine has started."""
    try:
        (_folder(state_dir) / worker_id).unlink(missing_ok=True)
    except OSError as error:
        log.warning("an earlier refusal cannot be removed: %s", error)


def refusals(state_dir: str) -> dict[str, tuple[str, float]]:
    """By worker id, the reason and when, in seconds since 1970. Raises OSError for a folder that cannot be read."""
    folder = _folder(state_dir)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {file.name: (file.read_text(encoding="utf-8", errors="replace"), file.stat().st_mtime) for file in files}


def _folder(state_dir: str) -> Path:
    return Path(state_dir).expanduser() / FOLDER


def saved_role_file(state_dir: str, worker_id: str) -> Path:
    """It exists only while the role differs from the role in the settings."""
    return Path(state_dir).expanduser() / "roles" / f"{worker_id}.json"
