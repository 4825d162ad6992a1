"""vLLM's schedulers with eight additions: reads may end between steps, the worker's calls are answered while a step is
computed, requests below the cache threshold are refused, transfer reports are sent with the first token, an answer
begins with the prefill leg's token (see ``first_token``), prompts whose KV was lost are computed in small parts beside
ready requests (see ``recompute_share``), no step is made only to forget ended requests, and LoRA adapters are hashed by
their content.

vLLM hashes an adapter's name and path into every block of its requests. Paths differ between machines, and one path may
have other files on another machine, whose KV must not be exchanged. So the front end puts a digest of the files in the
place of the path, and the path into ``base_model_name``, which nothing in the engine reads. The scheduler reverses this
in what it sends to the model runner, which loads an adapter again from its path after its cache has dropped it.
"""

from __future__ import annotations

import copy
import time
from dataclasses import fields
from functools import cache
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.connector import BatonConnector, order_of, params_of
from connector.reader.reader import Settled
from connector.scheduler.block_names import rename_if_late
from connector.scheduler.connector_scheduler import StepReport
from connector.scheduler.first_token import BEFORE_STEP, basis_of, begin, may_begin, output_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from connector.reader.reader import Reader
    from shared.contracts.kv_exchange import FirstToken

CACHE_THRESHOLD = "cache_threshold"
"""``stop_reason`` of a request that is refused because too little of it is cached."""


NOTHING = Settled()
"""What has ended in most steps, shared: nobody changes it."""
TRIES_MAX = 16
"""To make a step with work, before EngineCore gets one without: deadlines are checked with a step's output."""


class BatonScheduling:
    """Mixed in before one of vLLM's schedulers. Methods that use blocks hold the lock of ``CallsDuringSteps``."""

    connector: Any
    _ended_with_output = 0
    """Requests of ``finished_req_ids`` that the last output has counted as ended."""
    _has_share = False
    """The share of recomputes in the step that is made is known."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.connector, BatonConnector):
            raise TypeError("this scheduler is for the Baton connector: set kv_connector to BatonConnector")

    def has_finished_requests(self) -> bool:
        """Whether ended requests need a step. vLLM makes one, without tokens, for the model runner to forget them, in
        which a new request would wait; the next step with tokens tells it as well. But a request that ended in no step
        needs one, whose output tells the front end that it does not run any more.
        """
        if len(self.finished_req_ids) > self._ended_with_output:  # type: ignore[attr-defined]
            return True
        running, waiting = self.get_request_counts()  # type: ignore[attr-defined]
        return len(self.requests) > running + waiting  # type: ignore[attr-defined]

    def add_request(self, request: Request) -> None:
        """A new request: schedule it without waiting."""
        side = self.connector.connector_scheduler
        side.idle_wait.note_change()
        with side.calls.lock:
            if side.renamed_at:
                rename_if_late(request, side.renamed_at)
            super().add_request(request)  # type: ignore[misc]

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        """Ended requests free memory. Their releases are sent at once: an engine without requests does not step."""
        side = self.connector.connector_scheduler
        side.idle_wait.note_change()
        with side.calls.lock:
            finished: list[Request] = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
            side.push_notifications()
        return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """As vLLM's."""
        with self.connector.connector_scheduler.calls.lock:
            was_reset: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
            return was_reset

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Wait first, if the step could only check for grants or ended reads. Requests whose blocks have arrived take
        part in the step.

        A step in which nothing is computed costs two milliseconds: after it EngineCore sleeps for one. So one that has
        nothing to tell the model runner either is not made, but tried again when a read ends or a grant comes.
        """
        side = self.connector.connector_scheduler
        side.wait_if_idle()
        scheduled = self._schedule(*args, **kwargs)
        for _time in range(TRIES_MAX):
            if scheduled.total_num_scheduled_tokens or says_anything(scheduled) or not side.wait_for_more():
                break
            side.holder.computed(scheduled)
            scheduled = self._schedule(*args, **kwargs)
        return scheduled

    def _schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        side = self.connector.connector_scheduler
        with side.calls.lock:
            side.calls.end()
            side.idle_wait.begin_step()
            if side.reader.first_tokens:
                self.begin_answers()
            if not side.is_idle:
                if arrived := side.take_arrived():
                    self._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=arrived))  # type: ignore[attr-defined]
                self._cache_arrived(side.reader)
            side.holder.begin_step()
            self._has_share = False
            scheduled: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
            self._ended_with_output = 0
            if scheduled.total_num_scheduled_tokens:
                side.share.made(_prompt_tokens(scheduled), time.monotonic())
            if side.reader.first_tokens:
                self.begin_answers()
            side.idle_wait.note_step(scheduled.total_num_scheduled_tokens)
            if scheduled.scheduled_new_reqs:
                make_loadable(scheduled)
            side.calls.begin()
        return scheduled

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Asked by vLLM for each request of a step, with the tokens that the step has room for. A recompute gets its
        share of them. One that waits gets a token at least: vLLM would let those behind it wait, too.
        """
        if num_new_tokens > 1 and self._recomputes(request, num_computed_tokens):
            allowed = self._share_of(request, num_computed_tokens, num_new_tokens)
            num_new_tokens = allowed if request.status is RequestStatus.RUNNING else max(1, allowed)
        reserved: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)  # type: ignore[misc]
        return reserved

    def _recomputes(self, request: Request, computed_tokens: int) -> bool:
        """Whether it is a request that computes what it should have received. Each computes the tail after the last
        boundary, and the first token. A part may end within a block with a state: vLLM ends the next one with the block
        (``_mamba_block_aligned_split``), so that it still saves the state there.
        """
        order, missing = order_of(request), request.num_tokens - computed_tokens
        if order is None or not order.recomputes or missing <= 1:
            return False
        return missing > self._tail + 1 or request.request_id in self.connector.connector_scheduler.share.slowed

    @property
    def _tail(self) -> int:
        """Tokens at the end of a prompt that no other engine computes for this one."""
        groups = self.connector.connector_scheduler.reader.groups
        return int(groups.alignment + groups.beyond)

    def _share_of(self, request: Request, computed_tokens: int, new_tokens: int) -> int:
        """The first step of a recompute is bounded in any case: what was lost together with others' KV came with them,
        and those others may be a moment behind.
        """
        side = self.connector.connector_scheduler
        if not self._has_share:
            self._has_share = True
            first = None if request.status is RequestStatus.RUNNING else inf
            side.share.begin(target_s=min(self._targets_of_ready(request), default=first))
        allowed: int = side.share.allow(request.request_id, new_tokens, time.monotonic())
        if computed_tokens + allowed >= request.num_tokens:
            side.end_recompute(request.request_id)
        return allowed

    def _targets_of_ready(self, recomputing: Request) -> Iterator[float]:
        """Targets for the time between tokens, or infinity, of requests that decode, or will soon: they wait for their
        blocks, or have just come.
        """
        for request in chain(self.running, self.kv_holding_waiting, self.waiting):  # type: ignore[attr-defined]
            order, missing = order_of(request), request.num_tokens - request.num_computed_tokens
            is_new = request.status is RequestStatus.WAITING and not request.num_computed_tokens
            is_ready = order is not None and order.recomputes if is_new else missing <= self._tail + 1
            if is_ready and request is not recomputing:
                yield (order.itl_target_s if order is not None else 0.0) or inf

    def begin_answers(self) -> None:
        """Send the first tokens that have come with grants and offers, for the requests that may begin with them. Call
        with the lock held, and not while vLLM schedules.
        """
        side = self.connector.connector_scheduler
        for request_id, first in side.reader.take_first_tokens().items():
            request = self.requests.get(request_id)  # type: ignore[attr-defined]
            if request is None or not side.can_send or not self._may_begin(request, first):
                continue
            side.reader.began(request_id, request.num_tokens)
            begin(request, first.token_id)
            output = output_of(request, first.token_id, logs_stats=self.log_stats)  # type: ignore[attr-defined]
            output.kv_transfer_params = {**params_of(side.reader.transfer_report(request_id)), BEFORE_STEP: True}
            side.send(request.client_index, output)

    def _may_begin(self, request: Request, first: FirstToken) -> bool:
        """After a threshold that is not met, no token may have been sent."""
        order = order_of(request)
        if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS or order is None or order.cache_hit_threshold:
            return False
        model = self.vllm_config.model_config  # type: ignore[attr-defined]
        basis = basis_of(request, self.hash_block_size)  # type: ignore[attr-defined]
        if basis != first.basis or not may_begin(request, first.token_id, model):
            return False
        # vLLM has set no memory aside for the token of a prompt of whole blocks. If several requests that wait for KV
        # needed the last free block, none would run and free one.
        sizes = self.kv_cache_manager.coordinator.group_block_sizes  # type: ignore[attr-defined]
        needed = sum(not request.num_tokens % size for size in sizes)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()  # type: ignore[attr-defined]
        return not needed or free - self._inflight_prefill_reserved_blocks() >= needed  # type: ignore[attr-defined]

    def _cache_arrived(self, reader: Reader) -> None:
        """Put blocks of a prompt that is still computed elsewhere into the prefix cache. vLLM does it for all of them
        when the last one is there, which takes milliseconds while the request waits.
        """
        if (partly := reader.arrived_so_far()) is None:
            return
        request_id, tokens = partly
        request = self.requests[request_id]  # type: ignore[attr-defined]
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._name_full_attention(request, tokens)

    def _name_full_attention(self, request: Request, tokens: int) -> None:
        """Put blocks with full attention, up to so many tokens, into the prefix cache. vLLM's own method would name
        those of windows and states too, which have not arrived.
        """
        coordinator = self.kv_cache_manager.coordinator  # type: ignore[attr-defined]
        for number in self.connector.connector_scheduler.reader.groups.full:
            manager = coordinator.single_type_managers[number]
            if manager.enable_caching:
                cacheable = coordinator.get_num_cacheable_tokens(tokens, number)
                manager.cache_blocks(request, cacheable, replay_boundaries=())

    def _get_local_prefix_cache_hit(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """What is cached of a request. If a fetch can bring more, full attention counts that is cached beyond the other
        groups, which the fetch brings. It must not reach the boundary of the fetch: vLLM asks the connector for what
        lies beyond, and without a token to fetch there is no fetch.
        """
        hit: tuple[KVCacheBlocks, int, int, bool] = super()._get_local_prefix_cache_hit(request, *args, **kwargs)  # type: ignore[misc]
        manager, reader = self.kv_cache_manager, self.connector.connector_scheduler.reader  # type: ignore[attr-defined]
        order = order_of(request)
        if order is None or reader.groups.keeps_prefix or not manager.prefix_cache_lookup_enabled(request):
            return hit
        goal = reader.goal(request, order, hit[1])
        if hit[1] >= goal or not reader.groups.full:
            return hit
        found, ends = manager.coordinator.find_longest_cache_hit_per_group(request.block_hashes, request.num_tokens - 1)
        cached = min(ends[number] for number in reader.groups.full)
        cached = min(cached, goal - 1) // self.block_size * self.block_size  # type: ignore[attr-defined]
        if cached <= hit[1]:
            return hit
        sizes = manager.coordinator.group_block_sizes
        blocks = [
            found[number][: cached // size] if number in reader.groups.full else [] for number, size in enumerate(sizes)
        ]
        return manager.create_kv_cache_blocks(tuple(blocks)), cached, 0, True

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Name the requests whose blocks have arrived before vLLM processes the step, so that the next step schedules
        them. The worker role's own ``finished_recving`` would be one step later.
        """
        with self.connector.connector_scheduler.calls.lock:
            self.connector.connector_scheduler.calls.end()
            return self._update_from_output(scheduler_output, model_runner_output)

    def _update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        side = self.connector.connector_scheduler
        side.idle_wait.note_output(scheduler_output.total_num_scheduled_tokens)
        if scheduler_output.total_num_scheduled_tokens:
            side.share.ended(time.monotonic())
        side.holder.computed(scheduler_output)
        if scheduler_output.scheduled_spec_decode_tokens:
            self._note_drafts(scheduler_output, model_runner_output)
        report = model_runner_output.kv_connector_output
        worker_meta = report.kv_connector_worker_meta if report is not None else None
        settled = NOTHING
        if worker_meta is not None or not side.is_idle:
            settled = side.take_report(worker_meta if isinstance(worker_meta, StepReport) else None)
        if not settled.lacks_any and side.holder.has_followed:
            self._note_first_tokens(scheduler_output, model_runner_output)
            side.finish_step()
        if settled.ended:
            for request_id, tokens in settled.failed.items():
                self._name_full_attention(self.requests[request_id], tokens)  # type: ignore[attr-defined]
            model_runner_output = _with_ended(model_runner_output, settled)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        self._ended_with_output = len(self.finished_req_ids)  # type: ignore[attr-defined]
        if side.reader.admitted:
            self._send_transfer_reports(outputs, side.reader)
        if side.reader.refused:
            self._refuse(outputs)
        side.finish_step()
        return outputs

    def _note_first_tokens(self, scheduled: SchedulerOutput, ran: ModelRunnerOutput) -> None:
        """Tell the holder the tokens of prefill legs that the step has ended, for the grants that come before vLLM
        processes its output.
        """
        for request_id in scheduled.num_scheduled_tokens:
            request = self.requests.get(request_id)  # type: ignore[attr-defined]
            order = order_of(request) if request is not None else None
            if order is None or not order.leg_id or not ran.sampled_token_ids:
                continue
            if tokens := ran.sampled_token_ids[ran.req_id_to_index[request_id]]:
                self.connector.connector_scheduler.note_first_token(request, order.leg_id, int(tokens[0]))

    def _note_drafts(self, scheduled: SchedulerOutput, ran: ModelRunnerOutput) -> None:
        """Count the drafted tokens that the step has checked. All but the last of what it sampled were drafted. A
        request that has just begun has none yet: vLLM fills its step up with tokens that are not meant.
        """
        begun = {new.req_id for new in scheduled.scheduled_new_reqs} | scheduled.scheduled_cached_reqs.resumed_req_ids
        for request_id, drafted in scheduled.scheduled_spec_decode_tokens.items():
            request = self.requests.get(request_id)  # type: ignore[attr-defined]
            if request is None or order_of(request) is None or request_id in begun:
                continue  # Nobody takes what is counted of a request without an order.
            if sampled := ran.sampled_token_ids[ran.req_id_to_index[request_id]]:
                self.connector.connector_scheduler.note_drafts(request_id, len(drafted), len(sampled) - 1)

    def _send_transfer_reports(self, outputs: dict[int, EngineCoreOutputs], reader: Reader) -> None:
        """Send the report with a request's first token. A request that ends by a stop string is aborted from outside
        the engine, and an aborted request has no output that could carry it.
        """
        for core_outputs in outputs.values():
            for output in core_outputs.outputs:
                if output.request_id in reader.admitted and output.new_token_ids:
                    reader.admitted.discard(output.request_id)
                    if output.kv_transfer_params is None:
                        output.kv_transfer_params = params_of(reader.transfer_report(output.request_id))

    def _refuse(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """End the requests of which too little is cached, without a token."""
        reader = self.connector.connector_scheduler.reader
        refused, reader.refused = reader.refused, []
        reports = {request_id: params_of(reader.transfer_report(request_id)) for request_id in refused}
        for request in self.finish_requests(refused, RequestStatus.FINISHED_ABORTED):
            core_outputs = outputs.setdefault(request.client_index, EngineCoreOutputs())
            core_outputs.outputs = [*core_outputs.outputs, _refusal(request, reports[request.request_id])]


SAYS_NOTHING = frozenset(
    {
        "num_scheduled_tokens",
        "scheduled_cached_reqs",
        "scheduled_encoder_input_stats",
        "kv_connector_metadata",
        "kv_connector_block_state",
        "num_spec_tokens_to_schedule",
        "num_common_prefix_blocks",
        "skip_drafts",
    }
)
"""Fields of a step without tokens that the model runner does not need. Baton's orders go their own way (see
``ConnectorScheduler.share_process``)."""


def says_anything(scheduled: SchedulerOutput) -> bool:
    """Whether the model runner must know of this step."""
    if scheduled.total_num_scheduled_tokens:
        return True
    return any(getattr(scheduled, name) for name in _telling_fields(type(scheduled)))  # type: ignore[arg-type]


@cache
def _telling_fields(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind) if one.name not in SAYS_NOTHING)


def _prompt_tokens(scheduled: SchedulerOutput) -> int:
    """Tokens of a step besides one for each request, and those that a drafter proposed."""
    drafted = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
    return scheduled.total_num_scheduled_tokens - len(scheduled.num_scheduled_tokens) - drafted


def _refusal(request: Request, params: dict[str, Any]) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ABORT,
        stop_reason=CACHE_THRESHOLD,
        events=request.take_events(),
        kv_transfer_params=params,
        trace_headers=request.trace_headers,
    )


def _with_ended(output: ModelRunnerOutput, settled: Settled) -> ModelRunnerOutput:
    """A copy of the worker's output that also names ended fetches, and what did not arrive.

    vLLM computes from the first invalid block on, which needs a single group with full attention; requests that have
    failed it asks for again. Both need the recompute policy.
    """
    output = copy.copy(output)
    report = copy.copy(output.kv_connector_output) if output.kv_connector_output is not None else KVConnectorOutput()
    report.finished_recving = settled.ended
    report.failed_recving = set(settled.failed)
    report.invalid_block_ids = settled.empty
    output.kv_connector_output = report
    return output


class BatonScheduler(BatonScheduling, Scheduler):
    """For engines without asynchronous scheduling."""


class BatonAsyncScheduler(BatonScheduling, AsyncScheduler):
    """For engines with asynchronous scheduling."""


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
