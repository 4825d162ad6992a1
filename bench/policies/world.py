"""A replayed fleet whose router also counts the legs of each worker, as other systems' routers do."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from replay.legs import Leg, ReplayedRequest
from replay.profile import Profile
from replay.split import Split
from replay.world import World
from shared.contracts.ids import WorkerId
from shared.contracts.inference import LegKind


@dataclass(slots=True)
class Active:
    """Counts of one worker's legs that were sent and have not ended."""

    requests: int = 0
    prefill_tokens: int = 0
    """Uncached prompt tokens of legs without a first token, as predicted when they were sent."""
    prefill_s: float = 0.0
    """The time for ``prefill_tokens``, for policies that predict times."""
    context_tokens: int = 0
    """Prompt tokens of all these legs."""
    blocks: Counter[int] | None = None
    """How many of these legs hold each full block of a prompt; None where nobody counts that."""

    def blocks_with(self, chain: Sequence[int], block_tokens: int) -> float:
        """Blocks that its legs and a further prompt hold together; a block that several hold counts once. Without
        ``blocks`` all count.
        """
        if self.blocks is None:
            return self.context_tokens / block_tokens + len(chain)
        held = self.blocks
        shared = bisect_left(chain, x=True, key=lambda name: name not in held)  # whoever holds a block holds its prefix
        return len(held) + len(chain) - shared


class RequestCounts:
    """Counts of legs by worker."""

    def __init__(self) -> None:
        self.active: defaultdict[WorkerId, Active] = defaultdict(lambda: Active(blocks=Counter()))
        self.replayed: ReplayedRequest | None = None
        """The request that is being placed."""
        self.predicted_s: dict[int, float] = {}
        """Predicted prefill time by request number, until the prompt is computed."""

    def started(self, leg: Leg) -> None:
        """A leg was sent."""
        active = self.active[leg.worker.worker_id]
        active.requests += 1
        active.context_tokens += leg.job.prompt_tokens
        active.prefill_tokens += leg.uncached_tokens
        if active.blocks is not None:
            active.blocks.update(leg.job.chain)
        if leg.kind is not LegKind.DECODE:
            active.prefill_s += self.predicted_s.get(leg.replayed.number, 0.0)

    def prompt_computed(self, leg: Leg) -> None:
        """A leg's first token arrived."""
        active = self.active[leg.worker.worker_id]
        active.prefill_tokens -= leg.uncached_tokens
        if leg.kind is not LegKind.DECODE:
            active.prefill_s -= self.predicted_s.pop(leg.replayed.number, 0.0)

    def ended(self, leg: Leg) -> None:
        """A leg ended."""
        active = self.active[leg.worker.worker_id]
        active.requests -= 1
        active.context_tokens -= leg.job.prompt_tokens
        held = active.blocks
        if held is not None:
            for name in leg.job.chain:
                held[name] -= 1
                if not held[name]:
                    del held[name]


class PolicyWorld(World):
    """A world for any policy."""

    def __init__(
        self,
        split: Split,
        profile: Profile,
        *,
        slow: Mapping[int, float] = MappingProxyType({}),
        seed: int = 0,
        host_memory_bytes: int = 0,
    ) -> None:
        super().__init__(split, profile, slow=slow, seed=seed, host_memory_bytes=host_memory_bytes)
        self.counts = RequestCounts()

    def _arrives(self, now: float, replayed: ReplayedRequest) -> None:
        self.counts.replayed = replayed
        super()._arrives(now, replayed)

    def _start(self, leg: Leg, now: float) -> None:
        self.counts.started(leg)
        super()._start(leg, now)

    def _prompt_computed(self, now: float, leg: Leg) -> None:
        self.counts.prompt_computed(leg)
        super()._prompt_computed(now, leg)

    def _ended(self, now: float, leg: Leg) -> None:
        self.counts.ended(leg)
        super()._ended(now, leg)
