"""The decoding sequences of an engine. Each gets one token per step, so only steps are counted."""

from __future__ import annotations

from heapq import heappop, heappush

from replay.job import Job
from replay.profile import Profile


class Decoders:
    """Heaps of the next finishes and the next full blocks."""

    def __init__(self, profile: Profile) -> None:
        self.steps = 0
        """Completed steps."""
        self.context_tokens = 0
        """Tokens of all decoding sequences."""
        self._block_tokens = profile.block_tokens
        self._count = 0
        self._finishes: list[tuple[int, int, int, Job]] = []
        self._crossings: list[tuple[int, int, int, Job]] = []
        """Steps after which a sequence needs another block.

        Entries of both heaps: (steps, admission order, step of joining, job).
        """

    def __len__(self) -> int:
        return self._count

    @property
    def steps_alike(self) -> int:
        """Steps until the next finish or the next block."""
        heaps = (self._finishes, self._crossings)
        for heap in heaps:
            while heap and heap[0][3].since_step != heap[0][2]:
                heappop(heap)
        return max(1, min((heap[0][0] for heap in heaps if heap), default=self.steps + 1) - self.steps)

    def join(self, job: Job) -> None:
        """Add a job whose newest token was sampled in the step that has just ended."""
        job.since_step = self.steps
        self._count += 1
        self.context_tokens += job.tokens
        heappush(self._finishes, (self.steps + job.last_tokens - job.tokens, job.order, self.steps, job))
        heappush(self._crossings, (self.steps + (1 - job.tokens) % self._block_tokens, job.order, self.steps, job))

    def leave(self, job: Job) -> None:
        """Remove a finished or preempted job."""
        self._count -= 1
        self.context_tokens -= job.tokens + self.steps - job.since_step
        job.since_step = -1

    def stepped(self, steps: int) -> None:
        """Count completed steps."""
        self.steps += steps
        self.context_tokens += steps * self._count

    def finished(self) -> list[Job]:
        """Jobs whose last token came in the step that has just ended."""
        return [job for job in self._due(self._finishes) if job.since_step >= 0]

    def crossing(self) -> list[Job]:
        """Jobs that need another block in the next step."""
        due = self._due(self._crossings)
        for job in due:
            heappush(self._crossings, (self.steps + self._block_tokens, job.order, job.since_step, job))
        return due

    def _due(self, heap: list[tuple[int, int, int, Job]]) -> list[Job]:
        due = []
        while heap and heap[0][0] <= self.steps:
            _steps, _order, joined, job = heappop(heap)
            if job.since_step == joined:
                due.append(job)
        return due

    def everyone_left(self) -> list[tuple[int, Job]]:
        """(steps until it finishes, job) of every decoding job."""
        return [(steps - self.steps, job) for steps, _order, joined, job in self._finishes if job.since_step == joined]
