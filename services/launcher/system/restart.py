"""What to do when a process of the system dies: start it again, ever more slowly, or give up."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Limits; seconds."""

    backoff_s_first: float = 0.5
    backoff_s_max: float = 15.0
    deaths_max: int = 5
    """So many deaths within ``window_s`` mean that starting it again does not help."""
    window_s: float = 300.0


@dataclass(frozen=True)
class RestartAfter:
    """Start it again after a pause."""

    pause_s: float
    attempt: int


@dataclass(frozen=True)
class GiveUp:
    """Leave it dead."""

    deaths: int
    window_s: float


@dataclass
class RestartLedger:
    """The deaths of one process."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    deaths: list[float] = field(default_factory=list)

    def died(self, now: float) -> RestartAfter | GiveUp:
        """Decide; deaths longer ago than the window are forgiven."""
        self.deaths = [at for at in self.deaths if now - at < self.policy.window_s]
        self.deaths.append(now)
        count = len(self.deaths)
        if count >= self.policy.deaths_max:
            return GiveUp(deaths=count, window_s=self.policy.window_s)
        pause_s = self.policy.backoff_s_first * 2 ** (count - 1)
        return RestartAfter(pause_s=min(pause_s, self.policy.backoff_s_max), attempt=count)
