"""How fast a worker is, learned from what it measures of itself.

What counts as a sample matters more than how it is averaged. The seconds that a leg reports of its prompt are no clean
measure of that prompt: its steps were shared with the tails of others and with decoding, for a short prompt up to
twenty times its own work, and the more so the busier the worker. Time between tokens has the same fault. So both are
learned from the engine's own account of its steps (``StepTotals``): what was computed between two reports, all of it,
and how long that took. Nothing is blamed on anybody, whatever was batched together; idle time does not count; and the
very first report covers the worker's whole life, so a router that starts anew knows its fleet at once.

Only what no step has in it comes from single requests: the reading of KV, and the way to the engine and back.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.router.state.engine_speed import EngineSpeed
from services.router.state.unit_costs import Prior, Speeds, Typical
from shared.contracts.load import StepTotals
from shared.engine_speed import USUAL, Steps, Untaught

AT_FIRST = EngineSpeed()
PREFILL, DECODE = 0, 1
STEPS_AT_FIRST = Prior(USUAL, [PREFILL, PREFILL, PREFILL, DECODE, DECODE, DECODE], together=3.0, apart=1.0)
TRANSFERS_AT_FIRST = Prior([AT_FIRST.transfer_base_s, AT_FIRST.transfer_s_per_token], [0, 0], together=3.0, apart=1.0)
ALIKE_TOGETHER, ALIKE_APART = 0.25, 0.02
"""Variances between workers of one fingerprint: one may well be half again as fast as another."""
SAMPLE_S_MIN = 0.02
"""Less of steps says more of the clock than of the engine; it counts when there is more."""
YOUNG_SAMPLES, GROWN_SAMPLE_S, GROWN_READS = 50, 1.0, 4
"""After so many samples without a change a worker is known: then longer ones do, or every so many-th, which cost less.
"""
FAMILY_SHARE = 8
"""Of a known worker's samples, every so many-th is its family's as well."""
WAY_S_MIN = 1e-5
"""Clocks may say that an answer was here before it was made."""
PAIRS_STEP = 0.1


class SpeedEstimate:
    """Speeds of a worker. As long as it has no sample of its own they are its family's, which learns beside it."""

    __slots__ = ("_family", "_own")

    def __init__(self, prior: Prior, family: SpeedEstimate | None) -> None:
        self._family = family
        self._own = Speeds(prior)

    @property
    def is_own(self) -> bool:
        """Whether it has any sample."""
        return self._own.samples > 0

    @property
    def is_young(self) -> bool:
        """Whether each sample is welcome."""
        return self._own.settled < YOUNG_SAMPLES

    def values(self) -> list[float]:
        """Seconds for one of each."""
        return self._own.values() if self.is_own or self._family is None else self._family.values()

    def learn(self, work: Sequence[float], seconds: float) -> bool:
        """Answers whether that could be."""
        family, own = self._family, self._own
        if family is not None:
            if family.is_own and not self.is_own:
                self._own = own = family._own.like(ALIKE_TOGETHER, ALIKE_APART)
            if self.is_young or own.samples % FAMILY_SHARE == 0:
                family.learn(work, seconds)
        return own.learn(work, seconds)


class Learner:
    """Of one life of a worker, or of all workers of a fingerprint."""

    __slots__ = ("_family", "_pairs_per_token", "_reads", "_untaught", "_way", "steps", "transfers")

    def __init__(self, family: Learner | None = None) -> None:
        self._family = family
        self._untaught = Untaught()
        self._pairs_per_token: float = family._pairs_per_token if family else 0.0
        self._reads = 0
        self._way: Typical = family._way.like() if family else Typical(AT_FIRST.way_s)
        self.steps: SpeedEstimate = SpeedEstimate(STEPS_AT_FIRST, family.steps if family else None)
        self.transfers: SpeedEstimate = SpeedEstimate(TRANSFERS_AT_FIRST, family.transfers if family else None)

    def told(self, totals: StepTotals) -> bool:
        """The worker reports; answers whether anything was learned."""
        done = self._untaught.sample(totals, SAMPLE_S_MIN if self.steps.is_young else GROWN_SAMPLE_S)
        return done is not None and self.worked(done)

    def worked(self, done: Steps) -> bool:
        """Some steps of the engine; answers whether that could be."""
        if not self.steps.learn(done.work(), done.seconds):
            return False
        if done.prefill_tokens:
            self._prompts_were(done.prefill_pairs / done.prefill_tokens)
        return True

    def transfer_took(self, tokens: int, seconds: float, *, asked: bool = True) -> bool:
        """KV came from another worker; ``asked``: the time includes asking for it."""
        self._reads += 1
        # Not the sum of several: one absurd read would spoil it.
        if not self.transfers.is_young and self._reads % GROWN_READS:
            return False
        return tokens > 0 and self.transfers.learn([float(asked), tokens], seconds)

    def way_took(self, seconds: float) -> None:
        """A leg's first token took so much longer to the router than the engine had for it."""
        self._way.learn(max(seconds, WAY_S_MIN))
        if self._family is not None:
            self._family._way.learn(max(seconds, WAY_S_MIN))

    def coefficients(self) -> EngineSpeed:
        """As far as is known."""
        prefill_base_s, prefill_s, pair_s, decode_base_s, request_s, context_s = self.steps.values()
        transfer_base_s, transfer_s = self.transfers.values()
        return EngineSpeed(
            prefill_base_s=prefill_base_s,
            prefill_s_per_token=prefill_s,
            prefill_s_per_pair=pair_s,
            decode_base_s=decode_base_s,
            decode_s_per_request=request_s,
            decode_s_per_context_token=context_s,
            transfer_base_s=transfer_base_s,
            transfer_s_per_token=transfer_s,
            pairs_per_token=self._pairs_per_token,
            way_s=self._way.seconds,
        )

    def _prompts_were(self, pairs_per_token: float) -> None:
        before = self._pairs_per_token
        self._pairs_per_token = before + PAIRS_STEP * (pairs_per_token - before) if before else pairs_per_token
        if self._family is not None:
            self._family._prompts_were(pairs_per_token)
