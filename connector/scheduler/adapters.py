"""LoRA adapters in block hashes: named by the content of their files.

vLLM hashes an adapter's name and path into every block of its requests. Paths differ between machines, and one path may
have other files on another machine, whose KV must not be exchanged. So the front end puts a digest of the files in the
place of the path, and the path into ``base_model_name``, which nothing in the engine reads. The scheduler reverses this
in what it sends to the model runner, which loads an adapter again from its path after its cache has dropped it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.lora.request import LoRARequest

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

DIGEST = "sha256:"
"""Begins what stands for a path; no absolute path begins so."""


def hashed_by_content(request: LoRARequest, digest: str) -> LoRARequest:
    """The request for the scheduler: its blocks have the same hashes wherever an adapter of the same files has the same
    name.
    """
    return LoRARequest(request.lora_name, request.lora_int_id, f"{DIGEST}{digest}", base_model_name=request.lora_path)


def loadable(request: LoRARequest) -> LoRARequest:
    """The request for the model runner."""
    if not request.lora_path.startswith(DIGEST) or request.base_model_name is None:
        return request
    return LoRARequest(request.lora_name, request.lora_int_id, request.base_model_name)


def make_loadable(scheduled: SchedulerOutput) -> None:
    """Replace the adapters of a step's new requests for the model runner. Running requests keep theirs there."""
    for new in scheduled.scheduled_new_reqs:
        if new.lora_request is not None:
            new.lora_request = loadable(new.lora_request)
