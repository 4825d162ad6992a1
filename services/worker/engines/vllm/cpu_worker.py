"""vLLM's worker for CPUs, which survives a request with a seed whose prompt takes several steps, and serves as a later
pipeline stage without being compiled.

vLLM samples after each part of a prompt, drops the token, and takes the request's generator back by the numbers that
were drawn. Generators of a CPU cannot go back: the engine died of any such request.

VLLM makes the buffer for what a stage receives from the one before in a warm-up run, which CPUs only have with
``torch.compile``. Without the buffer the first request ended the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


class SeededCpuWorker(CPUWorker):
    """Samples what is dropped without the request's generator, so that nothing is to be taken back."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
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
