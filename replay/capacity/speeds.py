"""The engines to plan with: a profile, or what the workers of a running system have measured of theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from replay.profile import Profile
from shared.contracts.load import LoadReport
from shared.contracts.workers import WorkerRecord
from shared.engine_speed.learner import combined, is_measured, is_valid


class SpeedsError(ValueError):
    """No speeds to plan with; the message says why and what to do."""


class EngineSpeeds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast and how large one worker's engine is. The form of ``--export-speeds`` and of ``--speeds FILE``."""

    model: str = ""
    gpus: int = 1
    """GPUs of one worker."""
    prefill_step_s: float
    """Seconds that each step with prompt tokens takes beside its tokens."""
    prefill_token_s: float
    prefill_pair_s: float
    """Seconds for each earlier token that a computed token attends to."""
    decode_step_s: float
    decode_request_s: float
    """Seconds for each request in the batch of a decode step."""
    decode_context_token_s: float
    """Seconds for each token of context of the requests in a decode step."""
    kv_tokens: int
    """Size of the KV cache."""
    step_tokens_max: int = 2048
    """Tokens that the engine computes in one step, at most."""
    requests_max: int = 256
    """Requests in one step, at most."""
    kv_bytes_per_token: int | None = None
    """None: the profile's value."""
    transfer_bytes_per_s: float | None = None
    """Bandwidth at which a worker reads KV of another one; None: the profile's value."""

    def __post_init__(self) -> None:
        for name in ("prefill_token_s", "decode_step_s", "kv_tokens", "step_tokens_max", "requests_max", "gpus"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0")
        if (
            min(getattr(self, name) for name in self.__struct_fields__ if name.endswith("_s") and getattr(self, name))
            < 0
        ):
            raise ValueError("a time cannot be negative")


def profile_of(speeds: EngineSpeeds, base: Profile) -> Profile:
    """The replay's engine of these speeds; ``base`` says what they leave open. Raises SpeedsError."""
    blocks = speeds.kv_tokens // base.block_tokens
    if blocks < 1:
        raise SpeedsError(
            f"A KV cache of {speeds.kv_tokens} tokens is too small to simulate ({base.block_tokens} a block)."
        )
    return replace(
        base,
        kv_blocks=blocks,
        max_num_batched_tokens=speeds.step_tokens_max,
        max_num_seqs=speeds.requests_max,
        prefill_tokens_per_s=1.0 / speeds.prefill_token_s,
        prefill_base_s=speeds.prefill_step_s,
        prefill_s_per_pair=speeds.prefill_pair_s,
        decode_base_s=speeds.decode_step_s + speeds.decode_request_s,
        decode_per_sequence_s=speeds.decode_request_s,
        decode_per_context_token_s=speeds.decode_context_token_s,
        kv_bytes_per_token=speeds.kv_bytes_per_token or base.kv_bytes_per_token,
        transfer_bytes_per_s=speeds.transfer_bytes_per_s or base.transfer_bytes_per_s,
    )


def read_speeds(path: Path) -> EngineSpeeds:
    """Raises SpeedsError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineSpeeds)
    except OSError as error:
        raise SpeedsError(f"The speeds cannot be read: {error}") from error
    except msgspec.MsgspecError as error:
        raise SpeedsError(
            f"{path} does not hold engine speeds: {error}. `baton plan --export-speeds FILE` writes them."
        ) from error


def speeds_of(records: Sequence[WorkerRecord], loads: Sequence[LoadReport], model: str = "") -> EngineSpeeds:
    """What the workers of a model have learned, combined. Raises SpeedsError."""
    known = {record.worker_id: record for record in records if record.engine not in {"store", "attached"}}
    models = Counter(record.model for record in known.values())
    if not models:
        raise SpeedsError("No worker with an engine runs.")
    if model and model not in models:
        raise SpeedsError(f"No worker serves {model}; these are served: {', '.join(sorted(models))}.")
    if not model and len(models) > 1:
        raise SpeedsError(f"Several models run: {', '.join(sorted(models))}. Choose one with --model.")
    model = model or next(iter(models))
    of_model = [record for record in known.values() if record.model == model]
    reports = [load for load in loads if load.worker_id in {record.worker_id for record in of_model}]
    learned = combined([load.speed for load in reports if load.speed is not None and is_valid(load.speed)])
    phases = dict(zip(("prefill", "decode"), is_measured(learned) if learned else (False, False), strict=True))
    if learned is None or not all(phases.values()):
        missing = " and ".join(phase for phase, measured in phases.items() if not measured)
        raise SpeedsError(
            f"The workers of {model} have not measured their speed of {missing} yet. Send them requests first."
        )
    told = max(record.kv_token_bytes for record in of_model)
    received_bytes = sum(load.received_bytes_total for load in reports)
    received_tokens = sum(load.received_tokens_total for load in reports)
    reads = [read.bytes_per_s for record in of_model for read in record.kv_reads if read.bytes_per_s > 0]
    return EngineSpeeds(
        model=model,
        gpus=max(record.ranks for record in of_model),
        prefill_step_s=learned.prefill_step_s,
        prefill_token_s=learned.prefill_token_s,
        prefill_pair_s=learned.prefill_pair_s,
        decode_step_s=learned.decode_step_s,
        decode_request_s=learned.decode_request_s,
        decode_context_token_s=learned.decode_context_token_s,
        kv_tokens=min(record.kv_tokens for record in of_model),
        step_tokens_max=min(record.step_tokens_max for record in of_model),
        requests_max=min(record.legs_max for record in of_model),
        kv_bytes_per_token=told or (round(received_bytes / received_tokens) if received_tokens else None),
        transfer_bytes_per_s=float(min(reads)) if reads else None,
    )
