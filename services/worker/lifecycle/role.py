"""A worker's role: whether it may change, and how a changed role survives a crash of the process."""

from __future__ import annotations

import logging

import msgspec

from shared.contracts.workers import Role, WorkerPhase
from shared.runtime.saved_role import saved_role_file


class TakenRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role that was taken on at run time, as it is kept for the next life."""

    role: Role
    of_settings: Role
    """What the settings said then."""


def refusal(before: Role, after: Role, phase: WorkerPhase, *, is_changing: bool) -> str:
    """Why not, in words; empty when it may."""
    if Role.STORE in (before, after) and before is not after:
        return "a store has no engine, and an engine is no store"
    if phase is not WorkerPhase.READY:
        return f"it is {phase.value}"
    return "another change of its role is under way" if is_changing else ""


def to_keep(role: Role, of_settings: Role) -> TakenRole | None:
    """None: the settings say it already."""
    return None if role is of_settings else TakenRole(role=role, of_settings=of_settings)


def begins_as(of_settings: Role, kept: TakenRole | None) -> tuple[Role, str]:
    """The role of a life that begins, and what there is to note about it. Settings that were changed since the role was
    taken on are the newer order.
    """
    if kept is None or kept.of_settings is not of_settings:
        return of_settings, ""
    return kept.role, f"{kept.role.value}, as it was told to be before it was started again"


log = logging.getLogger("baton.worker")


class SavedRole:
    """The role of this life and, if it ends in a crash, of the next one. If the folder cannot be written to, the next
    life has the role of its settings.
    """

    def __init__(self, state_dir: str, worker_id: str, of_settings: Role) -> None:
        self._file = saved_role_file(state_dir, worker_id)
        self._of_settings = of_settings
        self.role, self.note = begins_as(of_settings, self._read())
        """With which this life begins, and what to note about it."""
        if self.role is of_settings:
            self.forget()  # what was kept under other settings
        else:
            log.info("the role is %s; the settings say %s", self.note, of_settings.value)

    def take_on(self, role: Role) -> None:
        """Remember it."""
        kept = to_keep(role, self._of_settings)
        if kept is None:
            self.forget()
            return
        draft = self._file.with_suffix(".draft")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(kept))
            draft.replace(self._file)
        except OSError as error:
            log.warning("the role %s will be forgotten if this process crashes: %s", role.value, error)

    def forget(self) -> None:
        """The next life begins as its settings say."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the next life of this worker may begin with a role of this one: %s", error)

    def _read(self) -> TakenRole | None:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=TakenRole)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("which role this worker had cannot be read: %s", error)
            return None
