"""The sequences of an engine that decode: each gets one token in every step, so only the number of steps is counted."""

from __future__ import annotations

from heapq import heappop, heappush

from replay.job import Job
from replay.profile import Profile


class Decoders:
    """Who decodes, who finishes after how many steps, and whose block is full then."""

    def __init__(self, profile: Profile) -> None:
        self.steps = 0
        """Steps that have ended."""
        self.context_tokens = 0
        """Tokens of all of them."""
        self._block_tokens = profile.block_tokens
        self._count = 0
        self._finishes: list[tuple[int, int, int, Job]] = []
        self._crossings: list[tuple[int, int, int, Job]] = []
        """Before the step after so many they need another block. Both: steps, order of admission, when it joined."""

    def __len__(self) -> int:
        return self._count

    @property
    def steps_alike(self) -> int:
        """Until somebody finishes or needs a block."""
        heaps = (self._finishes, self._crossings)
        for heap in heaps:
            while heap and heap[0][3].since_step != heap[0][2]:
                heappop(heap)
        return max(1, min((heap[0][0] for heap in heaps if heap), default=self.steps + 1) - self.steps)

    def join(self, job: Job) -> None:
        """Its newest token was sampled in the step that has just ended."""
        job.since_step = self.steps
        self._count += 1
        self.context_tokens += job.tokens
        heappush(self._finishes, (self.steps + job.last_tokens - job.tokens, job.order, self.steps, job))
        heappush(self._crossings, (self.steps + (1 - job.tokens) % self._block_tokens, job.order, self.steps, job))

    def leave(self, job: Job) -> None:
        """It has finished or was preempted."""
        self._count -= 1
        self.context_tokens -= job.tokens + self.steps - job.since_step
        job.since_step = -1

    def stepped(self, steps: int) -> None:
        """So many steps have ended."""
        self.steps += steps
        self.context_tokens += steps * self._count

    def finished(self) -> list[Job]:
        """Those whose last token came in the step that has just ended."""
        return [job for job in self._due(self._finishes) if job.since_step >= 0]

    def crossing(self) -> list[Job]:
        """Those that need another block in the step that begins."""
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
        """Everybody that decodes, and the steps until each finishes."""
        return [(steps - self.steps, job) for steps, _order, joined, job in self._finishes if job.since_step == joined]
