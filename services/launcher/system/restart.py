"""The pause before a dead process is started again. A process is restarted for ever, at growing intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

DOUBLINGS_MAX = 16


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Seconds."""

    backoff_s_first: float = 0.5
    backoff_s_max: float = 30.0
    settled_s: float = 300.0
    """After so long without a death the next pause is the first one again."""


@dataclass(frozen=True)
class Restart:
    """Start it again after a pause."""

    pause_s: float
    attempt: int
    """1 after a first death."""


@dataclass
class RestartHistory:
    """The deaths of one process."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    deaths: int = 0
    died_at: float = -math.inf

    def died(self, now: float) -> Restart:
        """Record a death."""
        self.deaths = 1 if now - self.died_at >= self.policy.settled_s else self.deaths + 1
        self.died_at = now
        pause_s = self.policy.backoff_s_first * 2.0 ** min(self.deaths - 1, DOUBLINGS_MAX)
        return Restart(pause_s=min(pause_s, self.policy.backoff_s_max), attempt=self.deaths)
