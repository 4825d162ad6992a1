"""An answer taken up where another engine broke off: what its client has had is gone through, and not said again."""

from __future__ import annotations

from dataclasses import replace

from services.worker.engines.simulated.jobs import Job
from services.worker.engines.simulated.requests import ApiError
from services.worker.engines.simulated.tokenizer import SimulatedTokenizer
from shared.contracts.inference import LegKind


def caught_up(job: Job, tokens: list[int], tokenizer: SimulatedTokenizer) -> Job:
    """The job as it stands behind ``tokens``: held-back text, offsets and counts, and perhaps its end. Raises ApiError
    for tokens that the model does not have, or more of them than fit.
    """
    record, choice = job.record, job.choices[0]
    if any(token >= tokenizer.model.size for token in tokens):
        raise ApiError("The tokens to resume from are out of vocabulary")
    record.caught_up = True
    choice.resumed = len(tokens)
    if record.kind is LegKind.PREFILL:
        if len(tokens) >= job.room:
            raise ApiError("The answer had filled the model's context: nothing can follow")
        choice.token_ids = list(tokens)
        return job
    for token in tokens:
        if choice.has_ended():
            break
        reason = job.wish.ending(token, len(choice.token_ids) + 1, tokenizer.model.eos)
        choice.add(token, tokenizer.texts.get(token, ""), reason)
    record.completion_tokens += len(choice.token_ids)
    if choice.has_ended():
        record.prompt_tokens += len(choice.prompt)
        record.finish_reason = choice.finish_reason
        return job
    wish = replace(
        job.wish,
        max_tokens=job.wish.max_tokens - len(tokens),
        min_tokens=max(0, job.wish.min_tokens - len(tokens)),
    )
    return replace(job, wish=wish)
