"""The connector as vLLM loads it: ``kv_connector_module_path`` names this module, ``kv_connector`` the class.

KV is addressed by content: a block is identified by its full chained hash, leased from a worker that holds it, read
over NIXL and released. See ARCHITECTURE.md. The interface is vLLM's ``KVConnectorBase_V1``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import msgspec
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from connector.layout.engine_layout import (
    UnsupportedEngine,
    beyond_boundaries,
    check_version,
    groups_of,
    refuse_unsupported,
    required_layout,
    retain_answers,
)
from connector.layout.tensors import UnsupportedLayout
from connector.messages import Orders, Results, read_settings
from connector.scheduler.block_names import rename_blocks
from connector.scheduler.connector_scheduler import ConnectorScheduler, EngineShape, StepOrders, StepReport
from connector.scheduler.event_publisher import register_publisher
from connector.worker.connector_worker import ConnectorWorker, RankHandshake
from shared.contracts.kv_exchange import KvTransferReport, LegOrder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

PARAMS = "baton"
"""Key in ``kv_transfer_params``: a packed LegOrder in requests, a packed KvTransferReport in outputs."""
COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

_order = msgspec.msgpack.Decoder(LegOrder)
_encode = msgspec.msgpack.Encoder().encode


def kv_exchange(core: Any, call: bytes) -> bytes:
    """Utility method added to ``EngineCore``: the only way to reach an idle engine, as connector hooks run in steps."""
    side: ConnectorScheduler = core.scheduler.connector.connector_scheduler
    side.attach_to(core)
    if side.idle_wait.is_attached and not side.idle_wait.wakes_on_reads and has_kv_transfer_group():
        worker_role = get_kv_transfer_group()  # in this process too, where vLLM runs the model in EngineCore
        assert isinstance(worker_role, BatonConnector)
        side.share_process(worker_role.submit, worker_role.results, worker_role.wake_on_results)
    with side.calls.lock:
        return side.exchange(call)


@contextmanager
def refusals_saved(file: str) -> Iterator[None]:
    """Writes the reason of a refusal to the file: the exception itself does not reach the worker's process."""
    try:
        yield
    except (UnsupportedEngine, UnsupportedLayout) as unsupported:
        if file:
            Path(file).write_text(str(unsupported), encoding="utf-8")
        raise


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles. vLLM makes one object per role, in one process or in several."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        check_version(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._refusal_file = settings.refusal_file
        with refusals_saved(self._refusal_file):
            refuse_unsupported(vllm_config, kv_cache_config)
        self.connector_scheduler: ConnectorScheduler
        self._worker: ConnectorWorker
        if role is KVConnectorRole.SCHEDULER:
            if settings.retains_answers:  # VLLM makes its cache manager after this object.
                retain_answers(kv_cache_config)
            assert kv_cache_config.hash_block_size is not None
            assert kv_cache_config.cache_hit_alignment_tokens is not None
            self._hash_block_size = kv_cache_config.hash_block_size
            alignment = kv_cache_config.cache_hit_alignment_tokens
            parallel = vllm_config.parallel_config
            ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
            beyond = max(beyond_boundaries(vllm_config, kv_cache_config))
            shape = EngineShape(self._hash_block_size, alignment, groups_of(kv_cache_config), ranks, beyond)
            self.connector_scheduler = ConnectorScheduler(settings, shape)
            EngineCore.kv_exchange = kv_exchange
            EngineCore.rename_blocks = rename_blocks
            register_publisher()
        else:
            make_agent = partial(resolve_name(settings.agent), backend=settings.fingerprint.kv_backend)
            self._worker = ConnectorWorker(vllm_config, kv_cache_config, make_agent)

    @property
    def requires_kv_delivery(self) -> bool:
        """Without an offer the decode worker computes the prompt, so a failed delivery is no failure of the request."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Called once, in EngineCore, before the backends' layouts are known."""
        return required_layout(vllm_config, is_cuda=current_platform.is_cuda())

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """Asked by vLLM 0.33. Its sleep would unmap memory that peers read; Baton ends the process instead."""
        return False

    # Scheduler role

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Receive the engine's blocks."""
        self.connector_scheduler.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All ranks have registered their memory: by pipeline stage and tensor-parallel rank."""
        ranks = [metadata[rank] for rank in sorted(metadata)]
        ranks_of_ours = [one for one in ranks if isinstance(one, RankHandshake)]
        described = [one.rank() for one in ranks_of_ours]
        clocks = {one.node: one.clock_s for one in ranks_of_ours if one.node}
        self.connector_scheduler.describe(described, self._kv_cache_config.num_blocks, clocks)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to fetch from other workers; None while grants are awaited or when the request is refused.

        After None, vLLM skips the request in this step and asks again in the next one.
        """
        order = order_of(request)
        if order is None:
            return 0, False
        tokens = self.connector_scheduler.reader.matched(request, order, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Called when vLLM has allocated the request's blocks."""
        order = order_of(request)
        if order is None:
            return
        side = self.connector_scheduler
        reads = bool(num_external_tokens)
        fresh = blocks.get_unhashed_block_ids_all_groups() if reads and not side.reader.groups.keeps_prefix else ()
        side.reader.allocated(request, blocks.get_block_ids() if reads else (), num_external_tokens, fresh)
        if not reads and not request.num_preemptions:
            cached_tokens = side.reader.cached_tokens(request.request_id)
            side.holder.note_prompt(request.block_hashes, request.num_prompt_tokens, cached_tokens, order.leg_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Orders for the worker role in this step."""
        self.connector_scheduler.holder.scheduled(scheduler_output)
        return self.connector_scheduler.step_orders(scheduler_output.total_num_scheduled_tokens)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the blocks of a prefill leg and report where a request's tokens came from.

        Returns False: the blocks are freed at once. An offer pins them itself, because a delayed free would keep
        EngineCore stepping until the last offer ends.
        """
        self.connector_scheduler.used(request.block_hashes, request.num_computed_tokens)
        order = order_of(request)
        if order is None:
            return False, None
        offer = first_token = None
        if order.leg_id and request.status in COMPLETE and request.output_token_ids:
            first_token = self.connector_scheduler.note_first_token(request, order.leg_id, request.output_token_ids[0])
        if order.offer and request.status in COMPLETE:
            offer = self.connector_scheduler.holder.offer(
                request.block_hashes, request.num_prompt_tokens, block_ids, order.offer_id, first_token
            )
        transfer_report = self.connector_scheduler.finished(request.request_id, offer, order)
        return False, params_of(transfer_report or KvTransferReport())

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step without a request."""
        with self.connector_scheduler.calls.lock:
            return self.connector_scheduler.must_step

    def reset_cache(self) -> bool | None:
        """Whether no block is leased: vLLM cannot reset the prefix cache while blocks are pinned."""
        return not self.connector_scheduler.holder.counts.leases

    # Worker role

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the memory that peers read and that own reads write."""
        with refusals_saved(self._refusal_file):
            self._worker.register_kv_caches(kv_caches)

    def submit(self, orders: Orders) -> None:
        """Begin what is ordered; for a scheduler role in the same process."""
        self._worker.submit(orders)

    def results(self) -> Results:
        """What happened since the last call; for a scheduler role in the same process."""
        return self._worker.results()

    def wake_on_results(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` on the transfer thread after each result; for a scheduler role in the same process."""
        self._worker.wake_on_results(wake)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Memory and agent of this rank."""
        return self._worker.handshake_rank()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step's reads here, before the forward pass: on a CPU the forward pass blocks, and reads run beside
        it.
        """
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepOrders) and connector_metadata.orders:
            self._worker.take_clock(connector_metadata.clock_ahead_s)
            self._worker.submit(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Reads begin in ``bind_connector_metadata``."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests wait in the scheduler, never in a layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is pushed."""

    def wait_for_save(self) -> None:
        """Nothing is pushed."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Always empty: the scheduler role reports arrived blocks (``connector.scheduler.engine_scheduler``)."""
        return KVConnectorTransferResults()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Results of this step."""
        orders = self._connector_metadata
        results = self._worker.results(orders.wait_s if isinstance(orders, StepOrders) else 0.0)
        return StepReport([results]) if results else None

    def shutdown(self) -> None:
        """Called when the engine ends."""
        if self._role is KVConnectorRole.SCHEDULER:
            self.connector_scheduler.close()
        else:
            self._worker.close()


def params_of(transfer_report: KvTransferReport) -> dict[str, Any]:
    """A report as vLLM's ``kv_transfer_params``."""
    return {PARAMS: _encode(transfer_report)}


def order_of(request: Request) -> LegOrder | None:
    """The worker's order for this request; decoded once."""
    params = request.kv_transfer_params
    packed = params.get(PARAMS) if params else None
    if isinstance(packed, bytes):
        packed = params[PARAMS] = _order.decode(packed)
    return packed
