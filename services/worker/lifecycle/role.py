"""A worker's role: whether it may change, and how a changed role survives a crash of the process."""

from __future__ import annotations

import logging

import msgspec

from shared.contracts.workers import Role, WorkerPhase
from shared.runtime.state_folder import saved_role_file

log = logging.getLogger("baton.worker")


class ChangedRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role that was ordered at run time, as it is saved for a restart."""

    role: Role
    of_settings: Role
    """The role in the settings at that time."""


def refusal(before: Role, after: Role, phase: WorkerPhase, *, is_changing: bool) -> str:
    """Why the role may not change; empty when it may."""
    if Role.STORE in (before, after) and before is not after:
        return "a store has no engine, and an engine is no store"
    if phase is not WorkerPhase.READY:
        return f"it is {phase.value}"
    return "another change of its role is under way" if is_changing else ""


def role_at_start(of_settings: Role, saved: ChangedRole | None) -> tuple[Role, str]:
    """The role of a process that starts, and a note about it. If the role in the settings has changed since the order,
    the settings are newer and win.
    """
    if saved is None or saved.of_settings is not of_settings:
        return of_settings, ""
    return saved.role, f"{saved.role.value}, as ordered before the restart"


class SavedRole:
    """The role of this process and, after a crash, of the next one. If the folder is not writable, the next process has
    the role of its settings.
    """

    def __init__(self, state_dir: str, worker_id: str, of_settings: Role) -> None:
        self._file = saved_role_file(state_dir, worker_id)
        self._of_settings = of_settings
        self.role, self.note = role_at_start(of_settings, self._read())
        if self.role is of_settings:
            self.forget()  # It was saved under other settings.
        else:
            log.info("the role is %s; the settings say %s", self.note, of_settings.value)

    def save(self, role: Role) -> None:
        """Remember it for the next process."""
        if role is self._of_settings:
            self.forget()
            return
        draft = self._file.with_suffix(".draft")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(ChangedRole(role=role, of_settings=self._of_settings)))
            draft.replace(self._file)
        except OSError as error:
            log.warning("the role %s will be lost if this process crashes: %s", role.value, error)

    def forget(self) -> None:
        """The next process starts with the role of its settings."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the saved role cannot be removed, the next process may start with it: %s", error)

    def _read(self) -> ChangedRole | None:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=ChangedRole)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("the saved role cannot be read: %s", error)
            return None
