"""Resumes a completion that another engine began: replays its tokens without sending their text again."""

from __future__ import annotations

from dataclasses import replace

from services.worker.engines.simulated.jobs import Job
from services.worker.engines.simulated.requests import ApiError
from services.worker.engines.simulated.tokenizer import SimulatedTokenizer
from shared.contracts.inference import LegKind


def caught_up(job: Job, tokens: list[int], tokenizer: SimulatedTokenizer) -> Job:
    """The job in its state after ``tokens``: held-back text, offsets, counts, and its end if they contain it. Raises
    ApiError for tokens outside the vocabulary, or for more than fit into the context.
    """
    record, choice = job.record, job.choices[0]
    if any(token >= tokenizer.model.size for token in tokens):
        raise ApiError("The tokens to resume from are out of vocabulary")
    record.caught_up = True
    choice.resumed = len(tokens)
    if record.kind is LegKind.PREFILL:
        if len(tokens) >= job.tokens_max:
            raise ApiError("The completion already fills the model's context")
        choice.token_ids = list(tokens)
        return job
    for token in tokens:
        if choice.has_ended():
            break
        reason = job.params.ending(token, len(choice.token_ids) + 1, tokenizer.model.eos)
        choice.add(token, tokenizer.texts.get(token, ""), reason)
    record.completion_tokens += len(choice.token_ids)
    if choice.has_ended():
        record.prompt_tokens += len(choice.prompt)
        record.finish_reason = choice.finish_reason
        return job
    params = replace(
        job.params,
        max_tokens=job.params.max_tokens - len(tokens),
        min_tokens=max(0, job.params.min_tokens - len(tokens)),
    )
    return replace(job, params=params)
