"""One decision as the console tells it: what was weighed and predicted, what came of it, and all that in words."""

from __future__ import annotations

from typing import Any

from services.collector.console.requests import part_name
from services.collector.console.views import RequestRow
from shared.contracts.decisions import DecisionRecord, TtftParts
from shared.contracts.failures import Reason
from shared.contracts.message import in_full
from shared.text import explanation as words

MEANINGS = {
    Reason.MODEL_UNKNOWN: "No worker has ever offered that model.",
    Reason.NO_WORKER: "No worker that could have served it was ready.",
    Reason.WORKER_DRAINING: "Its worker was about to leave.",
    Reason.WORKER_BUSY: "Its worker held as many legs as it may.",
    Reason.OVERLOADED: "It would have waited longer than anybody would want.",
    Reason.OVER_SHARE: "Its tenant had too much waiting already.",
    Reason.FORBIDDEN: "Its client may not ask for this.",
    Reason.CACHE_MISSED: "Too little of its prompt was where it was believed to be.",
    Reason.WORKER_LOST: "Its worker fell silent.",
    Reason.ENGINE_DEAD: "Its engine died.",
    Reason.FRAMES_LOST: "A piece of its answer was lost on the way.",
    Reason.CANNOT_RESUME: "Its stream broke off, and no other worker could go on with it.",
    Reason.DEADLINE: "It took longer than it may.",
    Reason.TOO_LARGE: "Its body was too large.",
    Reason.BUS_DOWN: "NATS could not be reached.",
    Reason.CLIENT_SLOW: "Its client read too slowly.",
    Reason.CANCELLED: "Its client left.",
    Reason.BAD_MESSAGE: "A message could not be read.",
    Reason.INTERNAL: "A bug: see the logs.",
}


def detail_of(row: RequestRow | None, decision: DecisionRecord) -> dict[str, Any]:
    """What the page shows of one request when somebody wants to know more."""
    told = in_full(decision)
    for candidate, one in zip(decision.candidates, told["candidates"], strict=True):
        one["why"] = words.why_not(candidate, words.chosen_one(decision, candidate.part))
    told["parts"] = parts_beside(decision.predicted, decision.measured)
    return {"request": row, "decision": told, "words": words_of(decision)}


def parts_beside(predicted: TtftParts, measured: TtftParts | None) -> list[dict[str, Any]]:
    """Each part of the time to the first token, as it was predicted and as it was."""
    return [
        {
            "name": part_name(name),
            "label": label,
            "predicted_s": getattr(predicted, name),
            "measured_s": getattr(measured, name) if measured is not None else None,
        }
        for name, label in words.PART_NAMES.items()
    ]


def words_of(decision: DecisionRecord) -> dict[str, Any]:
    """All that can be said of it."""
    return {
        "headline": words.headline(decision),
        "because": words.because(decision),
        "why": decision.reason,
        "ttft": words.ttft_text(decision),
        "cached": words.cached_text(decision),
        "regret": words.regret_text(decision),
        "targets": words.target_text(decision),
        "reason": meaning_of(decision.outcome),
    }


def meaning_of(outcome: str) -> str:
    """What a reason means; empty when all went well."""
    known = {reason.value: meaning for reason, meaning in MEANINGS.items()}
    return known.get(outcome, "") if outcome != words.OK else ""
