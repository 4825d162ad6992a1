"""Decides about a dead process: restart it after a growing pause, or give up."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Limits; seconds."""

    backoff_s_first: float = 0.5
    backoff_s_max: float = 15.0
    deaths_max: int = 5
    """With this many deaths within ``window_s`` the process is given up."""
    window_s: float = 300.0


@dataclass(frozen=True)
class RestartAfter:
    """Restart after a pause."""

    pause_s: float
    attempt: int


@dataclass(frozen=True)
class GiveUp:
    """Do not restart."""

    deaths: int
    window_s: float


@dataclass
class RestartHistory:
    """The deaths of one process."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    deaths: list[float] = field(default_factory=list)

    def died(self, now: float) -> RestartAfter | GiveUp:
        """Record a death and decide. Deaths before the window do not count."""
        self.deaths = [at for at in self.deaths if now - at < self.policy.window_s]
        self.deaths.append(now)
        count = len(self.deaths)
        if count >= self.policy.deaths_max:
            return GiveUp(deaths=count, window_s=self.policy.window_s)
        pause_s = self.policy.backoff_s_first * 2 ** (count - 1)
        return RestartAfter(pause_s=min(pause_s, self.policy.backoff_s_max), attempt=count)
