"""Would another choice have been better? As far as anybody can say who has made only the one."""

from __future__ import annotations

from collections.abc import Iterable

from shared.contracts.decisions import Candidate, Part, TtftParts

UNKNOWN = -1.0
NOTHING = 0.0
IMPOSSIBLE = float("inf")


def regret_s(predicted: TtftParts, measured: TtftParts | None, candidates: list[Candidate]) -> float:
    """By how much the measured time to the first token exceeds the best that was predicted for another choice.

    What the router itself spent before the legs would have been the same whatever was chosen; it is taken as measured.
    0 when nothing else would have been faster; -1 while nothing is measured.
    """
    if measured is None:
        return UNKNOWN
    best_s = best_other_s(candidates)
    if best_s == IMPOSSIBLE:
        return NOTHING
    before_s = measured.admission_s + measured.tokenize_s + measured.place_s + measured.failed_s
    return max(NOTHING, measured.total_s() - before_s - best_s - predicted.first_token_s - predicted.transit_s)


def best_other_s(candidates: list[Candidate]) -> float:
    """The least time to the first token that was predicted for other workers than the chosen ones, the router's own
    share aside; infinite when there was no other choice.
    """
    prefills, decodes, wholes = ([one for one in candidates if one.part is part] for part in Part)
    chosen_prefill, chosen_decode = _least(prefills, chosen=True), _least(decodes, chosen=True)
    apart = chosen_prefill + chosen_decode < IMPOSSIBLE
    pairs = (
        (_least(prefills, chosen=False) + chosen_decode, chosen_prefill + _least(decodes, chosen=False))
        if apart
        else (_least(prefills) + _least(decodes),)
    )
    return min(*pairs, _least(wholes, chosen=False))


def to_first_token_s(candidate: Candidate) -> float:
    """Its part of the time to the first token."""
    waited_s = candidate.queue_s + candidate.fetch_s + candidate.prefill_s + candidate.handoff_s
    return waited_s + candidate.first_token_s + candidate.transit_s


def _least(candidates: Iterable[Candidate], *, chosen: bool | None = None) -> float:
    fitting = [to_first_token_s(one) for one in candidates if chosen is None or one.chosen is chosen]
    return min(fitting, default=IMPOSSIBLE)
