"""One decision for the console: candidates, predicted and measured times, and sentences that explain them."""

from __future__ import annotations

from typing import Any

from services.collector.console.requests import part_name
from services.collector.console.views import RequestRow
from shared.contracts.decisions import DecisionRecord, TtftParts
from shared.contracts.failures import Reason
from shared.contracts.message import in_full
from shared.text import explanation

MEANINGS = {
    Reason.MODEL_UNKNOWN: "No worker has ever offered that model.",
    Reason.NO_WORKER: "No worker that could have served it was ready.",
    Reason.MODEL_ASLEEP: "The workers of its model slept, and it could not wait until they were awake.",
    Reason.WORKER_DRAINING: "Its worker was draining.",
    Reason.WORKER_BUSY: "Its worker already ran its maximum number of requests.",
    Reason.OVERLOADED: "The admission queue was full, or its wait would have been too long.",
    Reason.OVER_SHARE: "Its tenant already had its share of the queue waiting.",
    Reason.FORBIDDEN: "Its API key does not permit this.",
    Reason.CACHE_MISSED: "Less of its prompt was cached on the worker than predicted.",
    Reason.WORKER_LOST: "Its worker stopped reporting.",
    Reason.ENGINE_DEAD: "Its engine died.",
    Reason.QUARANTINED: "An engine died while it computed the same request shortly before.",
    Reason.FRAMES_LOST: "A message of its response stream was lost.",
    Reason.CANNOT_RESUME: "Its stream broke, and no other worker could resume it.",
    Reason.DEADLINE: "It exceeded its deadline.",
    Reason.TOO_LARGE: "Its body was too large.",
    Reason.BUS_DOWN: "NATS could not be reached.",
    Reason.CLIENT_SLOW: "Its client read too slowly.",
    Reason.CANCELLED: "Its client disconnected.",
    Reason.BAD_MESSAGE: "A message could not be read.",
    Reason.INTERNAL: "A bug: see the logs.",
}


def detail_of(row: RequestRow | None, decision: DecisionRecord) -> dict[str, Any]:
    """The data of the page's request panel."""
    content = in_full(decision)
    for candidate, one in zip(decision.candidates, content["candidates"], strict=True):
        one["why"] = explanation.why_not(candidate, explanation.chosen_one(decision, candidate.part))
    content["parts"] = parts_beside(decision.predicted, decision.measured)
    return {"request": row, "decision": content, "text": text_of(decision)}


def parts_beside(predicted: TtftParts, measured: TtftParts | None) -> list[dict[str, Any]]:
    """Each part of the time to the first token, predicted and measured."""
    return [
        {
            "name": part_name(name),
            "label": label,
            "predicted_s": getattr(predicted, name),
            "measured_s": getattr(measured, name) if measured is not None else None,
        }
        for name, label in explanation.PART_NAMES.items()
    ]


def text_of(decision: DecisionRecord) -> dict[str, Any]:
    """Sentences about the decision."""
    return {
        "headline": explanation.headline(decision),
        "because": explanation.because(decision),
        "why": decision.reason,
        "ttft": explanation.ttft_text(decision),
        "cached": explanation.cached_text(decision),
        "regret": explanation.regret_text(decision),
        "targets": explanation.target_text(decision),
        "reason": meaning_of(decision.outcome),
    }


def meaning_of(outcome: str) -> str:
    """What a failure reason means; empty on success."""
    known = {reason.value: meaning for reason, meaning in MEANINGS.items()}
    return known.get(outcome, "") if outcome != explanation.OK else ""
