"""The connector's scheduler role: grants leases, fetches KV for the engine's requests, gives orders to the worker role.

Called in two ways: by hooks of the scheduler in every step, and through ``exchange``, a utility call of the worker
process, which needs no step and may come while one is computed (see ``engine_loop``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.engine import EngineCoreOutputs
from zmq.constants import Flag, SocketOption, SocketType

from connector.groups import Blocks, GroupPlan
from connector.holder.boundaries import FindBoundary, Part
from connector.holder.holder import HolderSettings
from connector.layout.tensors import PROTOCOL_VERSION
from connector.messages import ConnectorSettings, EngineCall, EngineNotification, Orders, RankAggregation, Results
from connector.reader.fetch import FetchLimits
from connector.reader.prefetch import FREE_SHARE_MIN, HELD_SHARE_MAX, Held
from connector.reader.reader import Settled
from connector.scheduler.engine_loop import IDLE_WAIT_S_MAX, READ_WAIT_S_MAX, CallsDuringSteps, IdleWait
from connector.scheduler.exchange_core import ExchangeCore
from connector.scheduler.first_token import first_token_of
from connector.scheduler.grant_socket import GrantSocket
from connector.scheduler.grant_ways import GrantWays
from connector.scheduler.known_hashes import remember_hashes
from connector.scheduler.node_clocks import NodeClocks
from connector.scheduler.recompute_share import RecomputeShare
from shared.contracts.ids import Epoch, LegId, WorkerId
from shared.contracts.kv_exchange import (
    FirstToken,
    KvGrant,
    KvGroup,
    KvHandshake,
    KvOffer,
    KvRank,
    KvTransferReport,
    LegOrder,
)

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request


NOTIFICATION_QUEUE_MAX = 4096
"""Messages queued for a slow worker; further ones are dropped, which is safe because leases and requests expire."""

log = logging.getLogger("baton.connector")

REPORT_WAIT_S = 0.003
"""Time that a step that computes nothing waits in the worker role of another process for a read to end."""

_call = msgspec.msgpack.Decoder(EngineCall)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What peers must know of an engine besides its memory."""

    hash_block_size: int
    """``KvHandshake.hash_block_size``."""
    alignment: int
    """``KvHandshake.alignment``."""
    groups: list[KvGroup]
    ranks: int
    beyond: int = 0
    """See ``GroupPlan``."""


@dataclass
class StepOrders(KVConnectorMetadata):
    """Scheduler role to worker role, once per step."""

    orders: Orders = field(default_factory=Orders)
    wait_s: float = 0.0
    """How long the worker role waits at the end of the step for a result."""
    clock_ahead_s: dict[int, float] = field(default_factory=dict)
    """How far the clock of each further host of the engine is ahead of the scheduler's, at least."""


NO_ORDERS = StepOrders()
"""Orders of most steps, shared: nobody changes it."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Worker role to scheduler role, after a step with results; one ``Results`` per rank."""

    results: list[Results] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the reports of all ranks."""
        assert isinstance(other, StepReport)
        return StepReport(self.results + other.results)


class ConnectorScheduler:
    def __init__(self, settings: ConnectorSettings, shape: EngineShape) -> None:
        self._settings = settings
        self._shape = shape
        self._aggregation = RankAggregation(shape.ranks)
        self._clocks = NodeClocks()
        self._socket = NotificationSocket(settings.notifications)
        self.idle_wait = IdleWait()
        self.calls = CallsDuringSteps()
        self.share = RecomputeShare()
        self.drafts: dict[str, tuple[int, int]] = {}
        """Tokens drafted and accepted for each running request that has a drafter."""
        holder_settings = HolderSettings(
            worker_id=WorkerId(settings.worker_id),
            epoch=Epoch(settings.epoch),
            lease_s=settings.lease_s,
            lease_s_max=settings.lease_s_max,
            lease_share_max=settings.lease_share_max,
        )
        limits = FetchLimits(answer_s_max=settings.answer_s_max)
        self._results: Callable[[], Results] | None = None
        self._submit: Callable[[Orders], None] | None = None
        self.renamed_at = 0.0
        """When blocks got new names, on the wall clock; 0: never."""
        self._settled = Settled()
        """What has ended, and waits for a step's output because something did not arrive."""
        self._engine_core: Any = None
        self._grant_socket = GrantSocket(settings.grant_socket, self._on_direct_grant)
        ways = GrantWays(self._grant_socket.send, reply_to=self._grant_socket.path)
        groups = GroupPlan(shape.groups, shape.hash_block_size, shape.alignment, beyond=shape.beyond)
        self._core = ExchangeCore(holder_settings, groups, limits, time.monotonic, ways)
        self.holder = self._core.holder
        self.reader = self._core.reader

    def attach_to(self, core: Any) -> None:
        """Add to vLLM's EngineCore what ``engine_loop`` and ``known_hashes`` do. Does nothing the second time."""
        if self._engine_core is None:
            self._engine_core = core
            self.idle_wait.attach_to(core)
            self.calls.attach_to(core)
            remember_hashes(core)

    def bind(self, manager: KVCacheManager) -> None:
        """Set the engine's blocks."""
        pool = manager.block_pool
        groups = self.reader.groups
        find = boundary_finder(manager.coordinator, groups.beyond)
        self._core.bind(pool, PoolBlockAllocator(pool, groups), find)
        self.holder.watch(pool)

    def describe(self, ranks: list[KvRank], blocks: int, clocks: Mapping[int, float]) -> None:
        """All ranks have registered their memory, each with this number of blocks. ``clocks``: of the engine's further
        hosts, what their monotonic clocks showed a while ago.
        """
        for node, clock_s in clocks.items():
            self._clocks.heard(node, clock_s, time.monotonic())
        self._core.describe(
            KvHandshake(
                worker_id=WorkerId(self._settings.worker_id),
                epoch=Epoch(self._settings.epoch),
                version=PROTOCOL_VERSION,
                fingerprint=self._settings.fingerprint_key(self._shape.hash_block_size),
                clock_s=time.monotonic(),
                hash_block_size=self._shape.hash_block_size,
                alignment=self._shape.alignment,
                beyond=self.reader.groups.beyond,
                groups=self._shape.groups,
                blocks=blocks,
                ranks=ranks,
            )
        )

    def exchange(self, packed: bytes) -> bytes:
        """Carry out a packed ``EngineCall`` of the worker; returns a packed ``EngineNotification``."""
        self.idle_wait.wake()
        call = _call.decode(packed)
        self._core.handle(call)
        self._core.grant()
        self._give_orders()
        self._begin_answers()
        return _encode(self._core.notifications(describe=call.describe))

    def _on_direct_grant(self, grant: KvGrant) -> None:
        """On the socket's thread. Reads begin now, also while a step is computed."""
        with self.calls.lock:
            self._core.on_direct_grant(grant)
            self._give_orders()
            self._begin_answers()
            self.push_notifications()
        self.idle_wait.wake()

    def note_first_token(self, request: Request, leg_id: LegId, token: int) -> FirstToken | None:
        """A prefill leg has sampled a token; None if its readers cannot use it."""
        first_token = first_token_of(request, token, self._shape.hash_block_size)
        if first_token is not None:
            self.holder.note_first_token(leg_id, first_token)
        return first_token

    @property
    def can_send(self) -> bool:
        """Whether outputs can be sent between steps."""
        return hasattr(self._engine_core, "output_queue")

    def send(self, client: int, output: EngineCoreOutput) -> None:
        """Send an output to the front end at once: it waits for no step."""
        core = self._engine_core
        outputs = EngineCoreOutputs(outputs=[output], weight_version=core.get_weight_version())
        core.output_queue.put_nowait((client, outputs))

    def used(self, hashes: Sequence[bytes], computed_tokens: int) -> None:
        """A request has ended with the KV of its first ``computed_tokens``."""
        self._core.used(hashes, computed_tokens)

    def end_recompute(self, request_id: str) -> None:
        """The request has computed what it did not receive, or has ended."""
        if slowed_s := self.share.finished(request_id):
            self.reader.slowed(request_id, slowed_s)

    def finished(self, request_id: str, offer: KvOffer | None, order: LegOrder) -> KvTransferReport | None:
        self.end_recompute(request_id)
        transfer_report = self._core.finished(request_id, offer, order)
        drafted, accepted = self.drafts.pop(request_id, (0, 0))
        if not drafted:
            return transfer_report
        return msgspec.structs.replace(
            transfer_report or KvTransferReport(), drafted_tokens=drafted, accepted_tokens=accepted
        )

    def note_drafts(self, request_id: str, drafted: int, accepted: int) -> None:
        """A step has checked so many drafted tokens of a request."""
        before = self.drafts.get(request_id, (0, 0))
        self.drafts[request_id] = before[0] + drafted, before[1] + accepted

    def step_orders(self, scheduled_tokens: int) -> StepOrders:
        """Orders for the step that begins. Lease requests are sent here too, before the step computes.

        A step that computes nothing waits briefly for a read to end if the worker role cannot wake the engine, so
        that the request continues soon.
        """
        if self._core.is_idle:
            return NO_ORDERS
        self._give_orders()
        self.push_notifications()
        orders, self._core.orders = self._core.orders, Orders()
        waits = self._is_moving and not (scheduled_tokens or self.idle_wait.wakes_on_reads or self._is_in_lock_step)
        return StepOrders(orders, REPORT_WAIT_S if waits else 0.0, self._clocks.ahead_s(time.monotonic()))

    def share_process(
        self,
        submit: Callable[[Orders], None],
        results: Callable[[], Results],
        wake_on_results: Callable[[Callable[[], None]], None],
    ) -> None:
        """The worker role is in this process: it takes orders at once, not with the next step. ``results`` returns what
        it has to report since the last call.
        """
        self._submit = submit
        self._results = results
        wake_on_results(self.idle_wait.wake)
        self.idle_wait.wakes_on_reads = True

    def take_arrived(self) -> set[str]:
        """Requests whose whole fetch has arrived since the last report. Call before the scheduler makes a step: they
        take part in it, instead of in the one after it, or after the next if steps overlap.

        A fetch with missing blocks is left to ``take_report``, because vLLM handles those with a step's output.
        """
        results = self._results() if self._results is not None else None
        if not results:
            return set()
        settled = self.take_report(StepReport([results]))
        if settled.lacks_any:
            self._settled = settled
            return set()
        return settled.ended

    def take_report(self, report: StepReport | None) -> Settled:
        """Call after a step, before the scheduler processes its output. Returns what has ended since the last call."""
        if report is not None:
            self.idle_wait.note_change()
            for rank_results in report.results:
                for node, clock_s in rank_results.clocks.items():
                    self._clocks.heard(node, clock_s, time.monotonic())
                results = self._aggregation.add(rank_results)
                self._core.on_connected(results.connected)
                for part in results.parts:
                    self._core.on_part(part)
                for digested in results.digested:
                    self._core.on_digested(digested)
        self._core.on_time()
        settled = self.reader.settle()
        if self._settled.ended:
            self.idle_wait.note_change()
            settled.add(self._settled)
            self._settled = Settled()
        return settled

    def finish_step(self) -> None:
        """Call after the scheduler has processed a step's output; also before, for readers that follow a prompt, unless
        the scheduler will take back blocks that did not arrive.
        """
        core = self._core
        if core.is_idle and core.lends_nothing:
            return
        core.grant()
        self._give_orders()
        self.push_notifications()

    @property
    def is_idle(self) -> bool:
        """The next part of a step has nothing to do for the exchange, except to end leases on time."""
        return self._core.is_idle and not self._settled.ended

    def wait_if_idle(self) -> None:
        """Call before a step: wait if the step could only check for grants or ended reads."""
        if self._core.is_idle or self._is_in_lock_step:
            return
        with self.calls.lock:
            wait_s = self._idle_s()
        if wait_s:
            self.idle_wait.wait(wait_s)

    def _idle_s(self) -> float:
        """For how long a step would find nothing to do, unless the wait is ended."""
        if self._core.orders or (not self._is_moving and self.reader.idle):
            return 0.0
        if not self._is_moving:
            return IDLE_WAIT_S_MAX
        return READ_WAIT_S_MAX if self.idle_wait.wakes_on_reads else 0.0

    def wait_for_more(self) -> bool:
        """Call after a step without anything for the model runner: wait for what a next one could compute. Returns
        whether the scheduler shall try again before EngineCore continues.
        """
        owes_output = bool(self._settled.ended or self.reader.refused)
        if self._submit is None or owes_output or self.idle_wait.is_computing or self._is_in_lock_step:
            return False
        self.wait_if_idle()
        return self.idle_wait.has_only_changed

    @property
    def must_step(self) -> bool:
        """Whether the engine must step without a request: there are orders, or reads for no request are under way."""
        core = self._core
        is_working = core.orders or core.connecting or core.works_without_request
        return bool(is_working) or not self.reader.has_only_wanted_reads

    def push_notifications(self) -> None:
        """Notify the worker if there is something new."""
        if self._core.has_notifications:
            self._take_outbox()
            self._socket.push(self._core.notifications())

    def close(self) -> None:
        self._grant_socket.close()
        self.holder.release_all()
        self._socket.close()

    @property
    def _is_in_lock_step(self) -> bool:
        """Whether the other engines of a data parallel group wait for this one's next step: it computes one without
        tokens when it has nothing to compute.
        """
        return bool(getattr(self._engine_core, "engines_running", False))

    @property
    def _is_moving(self) -> bool:
        core = self._core
        return bool(core.connecting or self.reader.reads_under_way or core.works_without_request)

    def _give_orders(self) -> None:
        """At once to a worker role in this process, else with the next step."""
        self._take_outbox()
        if self._submit is not None and self._core.orders:
            orders, self._core.orders = self._core.orders, Orders()
            self._submit(orders)

    def _begin_answers(self) -> None:
        if self.reader.first_tokens and self._engine_core is not None:
            self._engine_core.scheduler.begin_answers()

    def _take_outbox(self) -> None:
        outbox, orders = self.reader.outbox, self._core.orders
        orders.reads += outbox.reads
        orders.cancel += outbox.cancel
        outbox.reads, outbox.cancel = [], []
        self._core.listen()


class NotificationSocket:
    """A ZMQ PUSH socket; does nothing if ``endpoint`` is empty."""

    def __init__(self, endpoint: str) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket: Any = None
        self.dropped = 0
        if endpoint:
            self._socket = zmq.Context.instance().socket(SocketType.PUSH)  # type: ignore[attr-defined]
            self._socket.setsockopt(SocketOption.SNDHWM, NOTIFICATION_QUEUE_MAX)
            self._socket.setsockopt(SocketOption.LINGER, 0)
            self._socket.connect(endpoint)

    def push(self, notification: EngineNotification) -> None:
        """Send, or drop and count if the queue is full."""
        if self._socket is None:
            return
        try:
            self._socket.send(self._encode(notification), Flag.NOBLOCK)
        except zmq.error.Again:
            self.dropped += 1
            log.warning("the worker does not receive its engine's notifications: %d dropped", self.dropped)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def boundary_finder(coordinator: KVCacheCoordinator, beyond: int = 0) -> FindBoundary:
    """The lookup of vLLM itself, which says for each group which blocks a request needs to continue. ``beyond``: see
    ``GroupPlan``.
    """
    # With one group, vLLM's maximum is of what it finds before it drops the end.
    dropped = beyond if len(coordinator.single_type_managers) == 1 else 0

    def find(hashes: list[bytes], tokens_max: int) -> tuple[list[Part], int]:
        named: Any = hashes  # vLLM's type of a hash is bytes under another name.
        groups, tokens, _uncached = coordinator.find_longest_cache_hit(named, tokens_max + dropped)
        return [_without_nulls(blocks) for blocks in groups], tokens

    return find


def _without_nulls(blocks: Sequence[KVCacheBlock]) -> Part:
    first = next((index for index, block in enumerate(blocks) if not block.is_null), len(blocks))
    return Part(first, blocks[first:])


class PoolBlockAllocator:
    """vLLM's block pool as a ``BlockAllocator``: memory for blocks of no request. Used on the scheduler's thread."""

    def __init__(self, pool: BlockPool, groups: GroupPlan) -> None:
        self._pool = pool
        self._groups = groups

    @property
    def blocks(self) -> int:
        """Blocks of the engine."""
        return int(self._pool.num_gpu_blocks)

    @property
    def fetch_blocks_max(self) -> int:
        """Blocks that all fetches together may pin."""
        return int(self._pool.num_gpu_blocks * HELD_SHARE_MAX)

    def hold(self, hashes: Sequence[bytes]) -> Held:
        """Pin what is cached of a prompt with these hashes."""
        groups = self._groups
        full, full_end = self._full_attention(hashes)
        others, boundary = self._last_boundary(hashes, full_end) if not groups.keeps_prefix else ([], full_end)
        blocks = [*full, *others]
        self._pool.touch(blocks)
        return Held(full_end // groups.unit, boundary // groups.unit, [block.block_id for block in blocks])

    def _full_attention(self, hashes: Sequence[bytes]) -> tuple[list[KVCacheBlock], int]:
        """The longest cached run of blocks of all groups with full attention, and its end."""
        groups = self._groups
        blocks: list[KVCacheBlock] = []
        for start in count(step=groups.stride) if groups.full else ():
            end = start + groups.stride
            found = self._cached(hashes, groups.full, start, end) if end <= len(hashes) * groups.unit else None
            if found is None:
                return blocks, start
            blocks += found
        return blocks, 0

    def _last_boundary(self, hashes: Sequence[bytes], full_end: int) -> tuple[list[KVCacheBlock], int]:
        """The blocks besides ``_full_attention`` with which all groups continue at the last boundary, and that one."""
        groups = self._groups
        every = range(len(groups.groups))
        others = [number for number in every if number not in groups.full]
        boundary = groups.cut(len(hashes) * groups.unit)
        if groups.full:
            boundary = min(boundary, groups.cut(full_end + groups.stride))
        while boundary > 0:
            found = self._cached(hashes, every if boundary > full_end else others, full_end, boundary)
            if found is not None:
                return found, boundary
            boundary -= groups.alignment
        return [], 0

    def _cached(
        self, hashes: Sequence[bytes], numbers: Iterable[int], start: int, boundary: int
    ) -> list[KVCacheBlock] | None:
        """The cached blocks with which these groups continue at the boundary; None if one lacks."""
        found: list[KVCacheBlock] = []
        for number in numbers:
            for index in self._groups.needed(number, start, boundary):
                name = BlockHash(self._groups.name_of(hashes, number, index, boundary))
                cached = self._pool.get_cached_block(name, [number])
                if cached is None:
                    return None
                found += cached
        return found

    def allocate(self, count: int) -> list[int]:
        """At most ``count`` blocks for new content; none if too few would remain for requests."""
        spare = self._pool.get_num_free_blocks() - int(self._pool.num_gpu_blocks * FREE_SHARE_MIN)
        count = min(count, spare)
        return [block.block_id for block in self._pool.get_new_blocks(count)] if count > 0 else []

    def cache(self, hashes: Sequence[bytes], blocks: Blocks, boundary: int) -> None:
        """Put the blocks into the prefix cache and publish the KV event.

        ``BlockPool.cache_full_blocks`` does this only for a Request. For blocks without one there is no public method.
        """
        pool, groups, number = self._pool, self._groups, blocks.group
        if not blocks.ids or not pool.enable_caching:
            return
        size = groups.groups[number].block_size
        named = [
            BlockHash(groups.name_of(hashes, number, index, boundary)) for index in range(blocks.first, blocks.end)
        ]
        for index, (name, block_id) in enumerate(zip(named, blocks.ids, strict=True), start=blocks.first):
            key = make_block_hash_with_group_id(name, number)
            pool._insert_block_hash(key, pool.blocks[block_id], num_tokens=min((index + 1) * size, boundary))
        if pool.enable_kv_cache_events:
            before = groups.name_of(hashes, number, blocks.first - 1, boundary) if blocks.first else None
            pool.kv_event_queue.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(name) for name in named],
                    parent_block_hash=maybe_convert_block_hash(BlockHash(before)) if before is not None else None,
                    token_ids=[],
                    block_size=size,
                    lora_id=None,
                    medium=pool.medium,
                    lora_name=None,
                    group_idx=number,
                )
            )

    def free(self, blocks: Sequence[int]) -> None:
        """Last blocks first, so that the end of a prefix is evicted before its beginning."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(blocks)])

    def evicted_next(self, count: int) -> set[bytes]:
        """Names of what is cached in the first ``count`` free blocks. The queue's last block has no next one."""
        names: set[bytes] = set()
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(count):
            if block is None:
                break
            if block.block_hash is not None:
                names.add(get_block_hash(block.block_hash))
            block = block.next_free_block
        return names

    def evict_first(self, blocks: Sequence[int], names: set[bytes]) -> None:
        """Those of these blocks that are free and have one of these names come first, the last block before others."""
        pool, first = self._pool, []
        for block in (pool.blocks[block_id] for block_id in dict.fromkeys(reversed(blocks))):
            name = block.block_hash
            if not block.ref_cnt and name is not None and get_block_hash(name) in names:
                pool.free_block_queue.remove(block)
                first.append(block)
        pool.free_block_queue.prepend_n(first)
