"""What an orchestrator can be told, from ORCHESTRATOR_* variables."""

from __future__ import annotations

import msgspec

from services.orchestrator.core.fleet import Limits
from shared.contracts.control import LEADERSHIP_TTL_S


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How patient one orchestrator is. Seconds."""

    instance: str = ""
    """One subject token that no other orchestrator has or had; made up when empty."""
    worker_silence_s_max: float = 3.0
    """A ready or draining worker that says nothing for so long is lost. Workers speak at least once a second."""
    unregistered_s_max: float = 10.0
    remember_s: float = 60.0
    """How long lost and gone workers are shown."""
    lease_s: float = LEADERSHIP_TTL_S
    """How soon a standby takes over from a leader that died. The same for all orchestrators."""

    def limits(self) -> Limits:
        """As the core wants them."""
        return Limits(
            silence_s_max=self.worker_silence_s_max,
            unregistered_s_max=self.unregistered_s_max,
            remember_s=self.remember_s,
        )
