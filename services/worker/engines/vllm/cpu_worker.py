"""vLLM's worker for CPUs, which survives a request with a seed whose prompt takes several steps, serves as a later
pipeline stage without being compiled and in a data parallel group, and leaves its core to others while it waits.

vLLM samples after each part of a prompt, drops the token, and takes the request's generator back by the numbers that
were drawn. Generators of a CPU cannot go back: the engine died of any such request.

VLLM makes the buffer for what a stage receives from the one before in a warm-up run, which CPUs only have with
``torch.compile``. Without the buffer the first request ended the engine.

VLLM's communicator for CPUs lacks what a data parallel group exchanges around the experts. Without it the first request
ended all engines of the group.

For a second after each message of EngineCore a rank of vLLM looks for the next one without a pause: while the engine
answers, each rank takes a whole core, which on a CPU other engines may need.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed
import vllm.distributed.device_communicators.shm_broadcast
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker
from zmq.constants import Flag

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


UNTOLD_MS = 1
"""A message that no notice tells of is found after this time. A notice is lost while an earlier one is under way."""


class PausingReader(SpinCondition):
    """Waits for a notice of the next message where vLLM's looks for the message itself again and again."""

    def wait(self, timeout_ms: int | None = None) -> None:
        if time.monotonic() > self.last_read + self.busy_loop_s:
            super().wait(timeout_ms)
        elif self.local_notify_socket in dict(self.poller.poll(UNTOLD_MS)):
            self.local_notify_socket.recv(Flag.DONTWAIT)


def all_gatherv(
    self: CpuCommunicator, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """The tensors of all ranks, one after the other; ``sizes``: rows of each rank. Gloo gathers equal ones only."""
    if isinstance(input_, list):
        return [self.all_gatherv(each, dim, sizes) for each in input_]
    assert dim == 0
    sizes = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    gathered = [torch.empty_like(padded) for _size in sizes]
    torch.distributed.all_gather(gathered, padded, group=self.cpu_group)
    return torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])


def reduce_scatterv(
    self: CpuCommunicator, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """The rank's rows of the sum over all ranks; ``sizes``: rows of each rank."""
    assert dim == 0
    total = input_.clone().contiguous()
    torch.distributed.all_reduce(total, group=self.cpu_group)
    sizes = sizes or [total.shape[0] // self.world_size] * self.world_size
    first = sum(sizes[: self.rank_in_group])
    return total[first : first + sizes[self.rank_in_group]].clone()


class SeededCpuWorker(CPUWorker):
    """Samples what is dropped without the request's generator, so that nothing is to be taken back."""

    def init_device(self) -> None:
        CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
        super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        # The queue of EngineCore's messages is made after this.
        vllm.distributed.device_communicators.shm_broadcast.SpinCondition = PausingReader
        super().load_model(load_dummy_weights=load_dummy_weights)
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        batch, runner = self.model_runner.input_batch, self.model_runner
        dropped = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        kept = {row: batch.generators.pop(row) for row in dropped if row in batch.generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            batch.generators.update(kept)
