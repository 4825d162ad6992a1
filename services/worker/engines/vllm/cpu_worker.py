"""vLLM's worker for CPUs, which survives a request with a seed whose prompt takes several steps.

vLLM samples after each part of a prompt, drops the token, and takes the request's generator back by the numbers that
were drawn. Generators of a CPU cannot go back: the engine died of any such request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.worker.cpu_worker import CPUWorker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


class SeededCpuWorker(CPUWorker):
    """Samples what is dropped without the request's generator, so that nothing is to be taken back."""

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        batch, runner = self.model_runner.input_batch, self.model_runner
        dropped = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        kept = {row: batch.generators.pop(row) for row in dropped if row in batch.generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            batch.generators.update(kept)
