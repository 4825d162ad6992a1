"""A decision in words: who did what, because of what, and how it turned out."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from shared.contracts.decisions import CandidateRecord, DecisionRecord, Part, TtftParts
from shared.text.quantities import counted, duration

DISAGGREGATED, DECODE_FIRST = "disaggregated", "decode_first"
TIE_RATIO = 0.05
TIE_S = 0.002
"""Costs that differ by less are as good as equal: placement lets such workers take turns."""
OK = "ok"
PART_NAMES = {
    "admission_s": "admission",
    "tokenize_s": "tokenize",
    "place_s": "place",
    "failed_s": "failed attempts",
    "queue_s": "queue",
    "fetch_s": "fetch KV",
    "prefill_s": "prefill",
    "handoff_s": "handoff",
    "decode_queue_s": "decode queue",
    "first_token_s": "first step",
    "transit_s": "transit",
}
"""Of the time to the first token, in the order in which they happen."""
LESSER = {
    "queue_s": "longer queue",
    "fetch_s": "more to fetch",
    "prefill_s": "slower prefill",
    "handoff_s": "slower handoff",
    "decode_s": "slower decode",
    "others_s": "delays others",
}
"""Why a worker was not chosen: what of its cost exceeds the chosen one's most."""
FIRST_PARTS = (Part.PREFILL, Part.WHOLE)
"""Whose workers compute the prompt."""


def headline(told: DecisionRecord) -> str:
    """Who served it."""
    request = f"Request {told.request_id}"
    if not told.mode:
        return f"{request} was not placed ({told.outcome or 'refused'}): {told.reason}"
    runs = not told.outcome
    done = "is being" if runs else "was"
    if told.mode == DISAGGREGATED:
        answered = "will be answered" if runs else "answered" if told.outcome == OK else "was to be answered"
        who = f"{done} computed on {told.prefill_worker} and {answered} by {told.decode_worker}"
    elif told.mode == DECODE_FIRST:
        who = f"{done} given to {told.decode_worker} alone, which was believed to have most of its prompt"
    else:
        who = f"{done} served by {told.decode_worker} alone"
    failed = "" if runs or told.outcome == OK else f", and did not end well ({told.outcome})"
    return f"{request} {who}{failed}."


def because(told: DecisionRecord) -> list[str]:
    """Why those workers: a sentence for each."""
    sentences = []
    for part in Part:
        chosen = chosen_one(told, part)
        if chosen is not None:
            sentences.append(_why_that_one(told, chosen, next_best(told, part)))
    return sentences


def chosen_one(told: DecisionRecord, part: Part) -> CandidateRecord | None:
    """Who got that part."""
    return next((one for one in told.candidates if one.part is part and one.chosen), None)


def next_best(told: DecisionRecord, part: Part) -> CandidateRecord | None:
    """The cheapest of the others."""
    others = [one for one in told.candidates if one.part is part and not one.chosen]
    return min(others, key=attrgetter("cost_s"), default=None)


def is_tie(one: CandidateRecord, other: CandidateRecord) -> bool:
    """As good as equal."""
    low, high = sorted((one.cost_s, other.cost_s))
    return high <= low * (1 + TIE_RATIO) + TIE_S


def counts(candidate: CandidateRecord, name: str) -> float:
    """What that part adds to the cost: of the time to generate, only what goes beyond the target."""
    value = float(getattr(candidate, name))
    return value - candidate.within_s if name == "decode_s" else value


def why_not(candidate: CandidateRecord, chosen: CandidateRecord | None) -> str:
    """In two words."""
    if candidate.chosen:
        return "chosen"
    if chosen is None:
        return ""
    if chosen.meets_targets and not candidate.meets_targets:
        return "misses target"
    if is_tie(candidate, chosen):
        return "as good"
    if candidate.cost_s < chosen.cost_s:
        return "not allowed"
    more = _most(candidate, chosen)
    if more in ("prefill_s", "fetch_s") and _had(candidate) < _had(chosen):
        return "less cached"
    return LESSER[more]


def regret_text(told: DecisionRecord) -> str:
    """Whether another choice would have been better, as far as anybody can say."""
    if told.measured is None:
        return ""
    if not any(not one.chosen for one in told.candidates):
        return "No regret: there was nobody to compare with."
    if told.regret_s <= 0:
        return "No regret: no other choice was predicted to be faster than this turned out to be."
    late = _latest(told.predicted, told.measured)
    words = (
        f"Regret {duration(told.regret_s)}: the best other choice was predicted to deliver the first token that much "
        "sooner than it came"
    )
    return f"{words}; {late}." if late else f"{words}."


def target_text(told: DecisionRecord) -> list[str]:
    """What was promised, and whether it was kept."""
    promised = (("TTFT", told.ttft_target_s, told.ttft_s), ("ITL", told.itl_target_s, told.itl_s))
    words = []
    for name, target_s, seconds in promised:
        if target_s >= 0:
            kept = "not known" if seconds < 0 else "met" if seconds <= target_s else "missed"
            taken = f" with {duration(seconds)}" if seconds >= 0 else ""
            words.append(f"{name} {duration(target_s)}: {kept}{taken}")
    return words


def ttft_text(told: DecisionRecord) -> str:
    """Predicted and measured, in a line."""
    predicted_s = told.predicted.total_s()
    if told.ttft_s < 0:
        return f"{duration(predicted_s)} predicted, nothing measured" + ("" if told.outcome else " yet")
    if not predicted_s:
        return f"{duration(told.ttft_s)} measured, nothing predicted"
    return f"{duration(predicted_s)} predicted, {duration(told.ttft_s)} measured"


def cached_text(told: DecisionRecord) -> str:
    """Predicted and actual cached tokens."""
    whole, predicted, actual = (
        counted(number) for number in (told.prompt_tokens, told.predicted_cached_tokens, told.cached_tokens)
    )
    if told.predicted_cached_tokens < 0:
        were = f"; {actual} were" if told.cached_tokens >= 0 else ""
        return f"about {whole} tokens; how many are cached could not be known{were}"
    if told.cached_tokens < 0:
        return f"{whole} tokens, {predicted} predicted to be cached"
    if told.cached_tokens == told.predicted_cached_tokens:
        return f"{whole} tokens, {actual} cached, exactly as predicted"
    return f"{whole} tokens, {predicted} predicted to be cached, {actual} were"


def printable(told: DecisionRecord) -> DecisionRecord:
    """The same, with nothing in it that a terminal would obey: some of its words are a client's."""
    return msgspec.structs.replace(
        told,
        **{
            name: value if value.isprintable() else ascii(value)
            for name in ("request_id", "model", "reason", "tenant", "outcome")
            if (value := getattr(told, name))
        },
    )


def _why_that_one(told: DecisionRecord, chosen: CandidateRecord, other: CandidateRecord | None) -> str:
    name = chosen.worker_id
    if other is None:
        could = {Part.PREFILL: "compute the prompt", Part.DECODE: "answer", Part.WHOLE: "do both"}[chosen.part]
        return f"{name} was chosen because it was the only one that could {could}."
    if is_tie(chosen, other):
        return f"{name} was as good as {other.worker_id}; such workers take turns."
    if other.cost_s < chosen.cost_s:
        if chosen.meets_targets and not other.meets_targets:
            return f"{name} was chosen because {other.worker_id}, which costs less, would have missed a target."
        return f"{name} was chosen although {other.worker_id} would have cost less ({told.reason})."
    compared = f"{duration(chosen.cost_s)} predicted against {duration(other.cost_s)} on {other.worker_id}"
    return f"{name} was chosen because {_advantage(told, chosen, other)}: {compared}, the next best."


def _advantage(told: DecisionRecord, chosen: CandidateRecord, other: CandidateRecord) -> str:
    most = _most(other, chosen)
    mine, theirs = duration(counts(chosen, most)), duration(counts(other, most))
    more = _had(chosen) > _had(other) or chosen.cached_tokens > other.cached_tokens
    if most in ("prefill_s", "fetch_s") and more:
        fetched = f" and could fetch {counted(chosen.fetched_tokens)}" if chosen.fetched_tokens else ""
        return f"it had {counted(chosen.cached_tokens)} of {counted(told.prompt_tokens)} prompt tokens cached{fetched}"
    return {
        "queue_s": f"its queue was shorter ({mine}, not {theirs})",
        "fetch_s": f"it had less to fetch ({mine}, not {theirs})",
        "prefill_s": f"it computes faster ({mine}, not {theirs})",
        "handoff_s": f"the KV gets there sooner ({mine}, not {theirs})",
        "decode_s": f"it generates faster ({mine}, not {theirs})",
        "others_s": f"it holds up other requests less ({mine}, not {theirs})",
    }[most]


def _most(dearer: CandidateRecord, cheaper: CandidateRecord) -> str:
    """The part of the cost in which they differ most."""
    return max(LESSER, key=lambda name: counts(dearer, name) - counts(cheaper, name))


def _had(candidate: CandidateRecord) -> int:
    return candidate.cached_tokens + candidate.fetched_tokens


def _latest(predicted: TtftParts, measured: TtftParts) -> str:
    over = {name: getattr(measured, name) - getattr(predicted, name) for name in PART_NAMES}
    most = max(over, key=lambda name: over[name])
    return f"most of it: {PART_NAMES[most]}, {duration(over[most])} more than predicted" if over[most] > 0 else ""
