"""The running system of a state directory: a lock that its launcher holds, and a file with its addresses."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

OWNER_ONLY = 0o700


class AlreadyRunning(Exception):
    """Another launcher holds this state directory."""


class RunningModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that `baton up` started."""

    model: str = ""
    """Name or folder of the model; empty: the worker's default."""
    aliases: tuple[str, ...] = ()


class RunningSystem(msgspec.Struct, frozen=True, kw_only=True):
    """What `baton up --join`, `baton workers` and `baton down` need to find a system."""

    pid: int
    nats_url: str
    endpoint: str
    engine: str
    models: list[RunningModel] = msgspec.field(default_factory=list)
    routers: dict[str, str] = msgspec.field(default_factory=dict)
    """Each router's own address, if several share the endpoint."""
    keys_dir: str = ""
    """Folder of its keys, if NATS requires keys."""


def running_file(state_dir: Path) -> Path:
    return state_dir / "running.json"


@contextlib.contextmanager
def hold(state_dir: Path) -> Iterator[None]:
    """Lock this state directory for one launcher. Raises AlreadyRunning."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=OWNER_ONLY)  # Logs, NATS storage and keys are below it.
    with (state_dir / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyRunning(str(state_dir)) from error
        try:
            yield
        finally:
            running_file(state_dir).unlink(missing_ok=True)


def write(state_dir: Path, system: RunningSystem) -> None:
    """Publish the system's addresses atomically."""
    draft = running_file(state_dir).with_suffix(f".{os.getpid()}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(system)))
    draft.replace(running_file(state_dir))


def find(state_dir: Path) -> RunningSystem | None:
    if not is_held(state_dir):
        return None
    try:
        return msgspec.json.decode(running_file(state_dir).read_bytes(), type=RunningSystem)
    except FileNotFoundError:
        return None


def is_held(state_dir: Path) -> bool:
    """Whether a launcher runs with this state directory."""
    try:
        with (state_dir / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
