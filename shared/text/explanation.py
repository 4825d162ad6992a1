"""Explains a placement decision as text: which workers served the request, why, and how the prediction compares."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from shared.contracts.decisions import CandidateRecord, DecisionRecord, Part, TtftParts
from shared.contracts.ids import RouterId
from shared.text.formats import counted, duration

NO_DECISION_ID = "That is not a decision id: each response has one in its header x-baton-decision."


def router_away(router_id: RouterId) -> str:
    """The router that made it does not respond."""
    return f"Router {router_id}, which made that decision, does not respond. It may have stopped."


def not_kept(router_id: RouterId) -> str:
    """The router does not store it any more."""
    return f"Router {router_id} no longer has that decision: it keeps the newest only (ROUTER_DECISIONS_BYTES_MAX)."


DISAGGREGATED, DECODE_FIRST = "disaggregated", "decode_first"
TIE_RATIO = 0.05
TIE_S = 0.002
"""Costs that differ by less count as equal; placement alternates between such workers."""
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
    "decode_prefill_s": "decode prefill",
    "front_end_and_bus_s": "front end and bus",
}
"""Parts of the time to the first token, in the order in which they happen."""
LESSER = {
    "queue_s": "longer queue",
    "fetch_s": "more to fetch",
    "prefill_s": "slower prefill",
    "handoff_s": "slower handoff",
    "decode_s": "slower decode",
    "others_s": "delays others",
}
"""Why a worker was not chosen, by the part of its cost that exceeds the chosen worker's most."""


def headline(decision: DecisionRecord) -> str:
    """The workers that serve or served the request, and whether it failed."""
    request = f"Request {decision.request_id}"
    if not decision.mode:
        return f"{request} was not placed ({decision.outcome or 'refused'}): {decision.reason}"
    status = (
        "is running" if not decision.outcome else "ran" if decision.outcome == OK else f"failed ({decision.outcome})"
    )
    if decision.prefetch is not None and decision.prefetch.is_order:
        return f"{request} ordered a prefetch, on {decision.prefetch.worker_id}; nothing was computed."
    if decision.mode == DISAGGREGATED:
        workers = f"prefill on {decision.prefill_worker}, decode on {decision.decode_worker}"
    elif decision.mode == DECODE_FIRST:
        workers = f"prefill and decode on {decision.decode_worker}, where most of the prompt was expected to be cached"
    else:
        workers = f"prefill and decode on {decision.decode_worker}"
    return f"{request} {status}: {workers}."


def prefetch_text(decision: DecisionRecord) -> str:
    """What a worker read before the request's legs began; empty: nothing."""
    prefetch = decision.prefetch
    if prefetch is None:
        return ""
    text = (
        f"{prefetch.worker_id} had {counted(prefetch.held_tokens)} tokens and read {counted(prefetch.fetched_tokens)} "
        f"in {duration(prefetch.seconds)}"
    )
    return f"{text}: {prefetch.failure}" if prefetch.failure else text


def because(decision: DecisionRecord) -> list[str]:
    """Why each worker was chosen, one sentence per part."""
    sentences = []
    for part in Part:
        chosen = chosen_one(decision, part)
        if chosen is not None:
            sentences.append(_why_chosen(decision, chosen, next_best(decision, part)))
    return sentences


def chosen_one(decision: DecisionRecord, part: Part) -> CandidateRecord | None:
    return next((one for one in decision.candidates if one.part is part and one.chosen), None)


def next_best(decision: DecisionRecord, part: Part) -> CandidateRecord | None:
    """The cheapest worker that was not chosen for ``part``."""
    others = [one for one in decision.candidates if one.part is part and not one.chosen]
    return min(others, key=attrgetter("cost_s"), default=None)


def is_tie(one: CandidateRecord, other: CandidateRecord) -> bool:
    """Whether the two costs count as equal."""
    low, high = sorted((one.cost_s, other.cost_s))
    return high <= low * (1 + TIE_RATIO) + TIE_S


def counts(candidate: CandidateRecord, name: str) -> float:
    """The seconds that a part adds to the cost. Decode time counts only as far as it exceeds the ITL target."""
    value = float(getattr(candidate, name))
    return value - candidate.within_s if name == "decode_s" else value


def why_not(candidate: CandidateRecord, chosen: CandidateRecord | None) -> str:
    """Why ``candidate`` was not chosen, as a short phrase."""
    if candidate.chosen:
        return "chosen"
    if chosen is None:
        return ""
    if chosen.meets_targets and not candidate.meets_targets:
        return "misses target"
    if is_tie(candidate, chosen):
        return "equal cost"
    if candidate.cost_s < chosen.cost_s:
        return "not allowed"
    more = _largest_difference(candidate, chosen)
    if more in ("prefill_s", "fetch_s") and _available_tokens(candidate) < _available_tokens(chosen):
        return "less cached"
    return LESSER[more]


def regret_text(decision: DecisionRecord) -> str:
    """Compares the measured time to the first token with the best prediction for another candidate."""
    if decision.measured is None:
        return ""
    if not any(not one.chosen for one in decision.candidates):
        return "No regret: there was no other candidate."
    if decision.regret_s <= 0:
        return "No regret: no other candidate was predicted to be faster than the measured time."
    late = _largest_delay(decision.predicted, decision.measured)
    text = (
        f"Regret {duration(decision.regret_s)}: the best other candidate was predicted to deliver the first token this "
        "much earlier than measured"
    )
    return f"{text}; {late}." if late else f"{text}."


def target_text(decision: DecisionRecord) -> list[str]:
    """Each latency target and whether the request met it."""
    lines = []
    if decision.ttft_target_s >= 0:
        predicted = f"{duration(decision.predicted.total_s())} predicted from its placement on"
        expected = _expected(predicted, decision.ttft_probability)
        lines.append(f"TTFT target {_result(decision.ttft_target_s, decision.ttft_s)}{expected}")
    if decision.itl_target_s >= 0:
        expected = _expected(f"{duration(decision.predicted_itl_s)} predicted", decision.itl_probability)
        lines.append(f"ITL target {_result(decision.itl_target_s, decision.itl_s)}{expected}")
    return lines


def _result(target_s: float, seconds: float) -> str:
    """Whether a target was met."""
    result = "not measured" if seconds < 0 else "met" if seconds <= target_s else "missed"
    measured = f" ({duration(seconds)})" if seconds >= 0 else ""
    return f"{duration(target_s)}: {result}{measured}"


def _expected(predicted: str, probability: float) -> str:
    """The probability that a target is met, with what was predicted; empty where it is not known."""
    if probability < 0:
        return ""
    percent = "over 99" if probability > 0.99 else "under 1" if probability < 0.01 else f"{100 * probability:.0f}"
    return f"; {predicted}, which meets it with {percent} %"


def gap_text(decision: DecisionRecord) -> str:
    """The gap between prompts that the request waited for; empty if it waited for none."""
    if not decision.gap_worker:
        return ""
    return (
        f"waited for {decision.gap_worker} to leave one between prompts: its steps with prompt tokens take "
        f"{duration(decision.gap_step_s)}, which answers beside them can afford only now and then"
    )


def ttft_text(decision: DecisionRecord) -> str:
    """The time to the first token, predicted and measured."""
    predicted_s = decision.predicted.total_s()
    if decision.ttft_s < 0:
        return f"{duration(predicted_s)} predicted, nothing measured" + ("" if decision.outcome else " yet")
    if not predicted_s:
        return f"{duration(decision.ttft_s)} measured, nothing predicted"
    return f"{duration(predicted_s)} predicted, {duration(decision.ttft_s)} measured"


def cached_text(decision: DecisionRecord) -> str:
    """Length of the prompt; predicted and actual cached tokens."""
    whole, predicted, actual = (
        _length(decision),
        counted(decision.predicted_cached_tokens),
        counted(decision.cached_tokens),
    )
    if decision.predicted_cached_tokens < 0:
        were = f"; {actual} were cached" if decision.cached_tokens >= 0 else ""
        because = f", because {decision.why_inexact}" if decision.why_inexact else ""
        return f"{whole}; cached tokens could not be predicted{because}{were}"
    if decision.cached_tokens < 0:
        return f"{whole}, {predicted} predicted to be cached"
    if decision.cached_tokens == decision.predicted_cached_tokens:
        return f"{whole}, {actual} cached, as predicted"
    return f"{whole}, {predicted} predicted to be cached, {actual} were cached"


def drafts_text(decision: DecisionRecord) -> str:
    """How many of the tokens that a drafter proposed the model agreed with."""
    accepted = min(max(decision.accepted_tokens, 0), decision.drafted_tokens)
    share = accepted / decision.drafted_tokens
    return f"{counted(accepted)} of {counted(decision.drafted_tokens)} drafted tokens accepted ({share:.0%})"


THRESHOLDS_OF = {
    "request": "set by the request",
    "worker_default": "the worker's default",
    "decode_first": "set by the router for decode first",
    "failure_policy": "set by the router's failure policy",
}
"""Who set a cache hit threshold, by ``DecisionRecord.threshold_from``."""


def threshold_text(decision: DecisionRecord) -> str:
    """The cache hit threshold, who set it, and what was found; empty without one."""
    threshold, found = decision.cache_hit_threshold, decision.hit_share
    if threshold < 0:
        return ""
    text = f"{threshold:.0%} must be cached or fetched ({THRESHOLDS_OF.get(decision.threshold_from, 'set by nobody')})"
    if found < 0:
        return text
    return f"{text}; {found:.1%} was: {'refused' if found < threshold else 'served'}"


def _length(decision: DecisionRecord) -> str:
    if decision.counted_prompt_tokens < 0:
        return f"about {counted(decision.prompt_tokens)} tokens"
    estimated = decision.prompt_tokens != decision.counted_prompt_tokens
    note = f" (about {counted(decision.prompt_tokens)} estimated)" if estimated else ""
    return f"{counted(decision.counted_prompt_tokens)} tokens{note}"


def printable(decision: DecisionRecord) -> DecisionRecord:
    """A copy whose texts contain no terminal control characters; clients supply some of them."""
    return msgspec.structs.replace(
        decision,
        **{
            name: value if value.isprintable() else ascii(value)
            for name in ("request_id", "model", "reason", "tenant", "outcome")
            if (value := getattr(decision, name))
        },
    )


def _why_chosen(decision: DecisionRecord, chosen: CandidateRecord, other: CandidateRecord | None) -> str:
    name = chosen.worker_id
    if other is None:
        could = {Part.PREFILL: "run the prefill", Part.DECODE: "run the decode", Part.WHOLE: "run both"}[chosen.part]
        return f"{name} was chosen because no other worker could {could}."
    if is_tie(chosen, other):
        return f"{name} was chosen; {other.worker_id} costs the same, and placement alternates between equal workers."
    if other.cost_s < chosen.cost_s:
        if chosen.meets_targets and not other.meets_targets:
            return f"{name} was chosen because {other.worker_id}, which costs less, would miss a target."
        return f"{name} was chosen although {other.worker_id} costs less ({decision.reason})."
    compared = f"predicted cost {duration(chosen.cost_s)}, next best {duration(other.cost_s)} on {other.worker_id}"
    return f"{name} was chosen because {_advantage(decision, chosen, other)}: {compared}."


ADVANTAGES = {
    "queue_s": "its queue is shorter",
    "fetch_s": "it has less KV to fetch",
    "prefill_s": "its prefill is faster",
    "handoff_s": "its KV handoff is faster",
    "decode_s": "its decode is faster",
    "others_s": "it delays other requests less",
}
"""Reasons by the part of the cost."""


def _advantage(decision: DecisionRecord, chosen: CandidateRecord, other: CandidateRecord) -> str:
    most = _largest_difference(other, chosen)
    mine, theirs = duration(counts(chosen, most)), duration(counts(other, most))
    more = _available_tokens(chosen) > _available_tokens(other) or chosen.cached_tokens > other.cached_tokens
    if most in ("prefill_s", "fetch_s") and more:
        fetched = f" and can fetch {counted(chosen.fetched_tokens)}" if chosen.fetched_tokens else ""
        return (
            f"it has {counted(chosen.cached_tokens)} of {counted(decision.prompt_tokens)} prompt tokens cached{fetched}"
        )
    return f"{ADVANTAGES[most]} ({mine} instead of {theirs})"


def _largest_difference(dearer: CandidateRecord, cheaper: CandidateRecord) -> str:
    """The part of the cost in which ``dearer`` exceeds ``cheaper`` most."""
    return max(LESSER, key=lambda name: counts(dearer, name) - counts(cheaper, name))


def _available_tokens(candidate: CandidateRecord) -> int:
    return candidate.cached_tokens + candidate.fetched_tokens


def _largest_delay(predicted: TtftParts, measured: TtftParts) -> str:
    over = {name: getattr(measured, name) - getattr(predicted, name) for name in PART_NAMES}
    most = max(over, key=lambda name: over[name])
    return f"largest delay: {PART_NAMES[most]}, {duration(over[most])} more than predicted" if over[most] > 0 else ""
