"""The role that a worker was told to take on outlives its process, unless that ended in order."""

from __future__ import annotations

import logging

import msgspec

from services.worker.lifecycle.role_change import TakenRole, begins_as, to_keep
from shared.contracts.workers import Role
from shared.runtime.saved_role import saved_role_file

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
