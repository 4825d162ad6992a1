"""vLLM's schedulers with three things more: reads that end between steps, refused requests, followers told in time."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.connector import BatonConnector, params_of
from connector.scheduler.connector_scheduler import StepReport

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from connector.reader.reader import Reader

CACHE_THRESHOLD = "cache_threshold"
"""``stop_reason`` of a request that was refused because too little of it was cached."""


class BatonScheduling:
    """Mixed in before one of vLLM's schedulers."""

    connector: Any

    def add_request(self, request: Request) -> None:
        """A new request: no rest before it has been looked at."""
        self.connector.connector_scheduler.idle_wait.note_change()
        super().add_request(request)  # type: ignore[misc]

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        """What ends makes room; what it gives back is told at once, for an engine left with nothing does not step."""
        self.connector.connector_scheduler.idle_wait.note_change()
        finished: list[Request] = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        self.connector.connector_scheduler.push_notifications()
        return finished

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """After a rest, if all that could be done was to look again whether something has come."""
        side = self.connector.connector_scheduler
        side.wait_if_idle()
        scheduled: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        side.idle_wait.note_step(scheduled.total_num_scheduled_tokens)
        return scheduled

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Around vLLM's own: requests whose blocks have come are named in time for it to go on with them."""
        if not isinstance(self.connector, BatonConnector):
            raise TypeError("this scheduler is for the Baton connector: set kv_connector to BatonConnector")
        side = self.connector.connector_scheduler
        side.holder.computed(scheduler_output)
        report = model_runner_output.kv_connector_output
        worker_meta = report.kv_connector_worker_meta if report is not None else None
        ended, empty = side.take_report(worker_meta if isinstance(worker_meta, StepReport) else None)
        if ended:
            model_runner_output = _with_ended(model_runner_output, ended, empty)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        if side.reader.admitted:
            self._send_transfer_reports(outputs, side.reader)
        self._refuse(outputs)
        side.finish_step()
        return outputs

    def _send_transfer_reports(self, outputs: dict[int, EngineCoreOutputs], reader: Reader) -> None:
        """With a request's first token: one that ends by a stop string, outside the engine, has no other chance."""
        for told in outputs.values():
            for output in told.outputs:
                if output.request_id in reader.admitted and output.new_token_ids:
                    reader.admitted.discard(output.request_id)
                    if output.kv_transfer_params is None:
                        output.kv_transfer_params = params_of(reader.transfer_report(output.request_id))

    def _refuse(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """End the requests of which too little is cached: no token, no compute."""
        reader = self.connector.connector_scheduler.reader
        if not reader.refused:
            return
        refused, reader.refused = reader.refused, []
        for request in self.finish_requests(refused, RequestStatus.FINISHED_ABORTED):
            told = outputs.setdefault(request.client_index, EngineCoreOutputs())
            told.outputs = [*told.outputs, _refusal(request, self.connector.refusal_of(request.request_id))]


def _refusal(request: Request, params: dict[str, Any] | None) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ABORT,
        stop_reason=CACHE_THRESHOLD,
        events=request.take_events(),
        kv_transfer_params=params,
        trace_headers=request.trace_headers,
    )


def _with_ended(output: ModelRunnerOutput, ended: set[str], empty: set[int]) -> ModelRunnerOutput:
    """The worker's output, saying also which requests' blocks have come. Never changes vLLM's own."""
    output = copy.copy(output)
    report = copy.copy(output.kv_connector_output) if output.kv_connector_output is not None else KVConnectorOutput()
    report.finished_recving = ended
    report.invalid_block_ids = empty
    output.kv_connector_output = report
    return output


class BatonScheduler(BatonScheduling, Scheduler):
    """For engines that wait for each step."""


class BatonAsyncScheduler(BatonScheduling, AsyncScheduler):
    """For engines that schedule the next step while one computes."""
