"""A handshake whose numbers are out of bounds is refused, and the refusal names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from connector.layout.bounds import ADDRESS_END, AGENT_BYTES_MAX, LAYER_NAME_MAX, LAYERS_MAX, PLANES_MAX, RANKS_MAX
from connector.layout.tensors import why_malformed, why_not
from connector.messages import Orders, Peer
from connector.transfer.memory_agent import MemoryNetwork
from connector.worker.transfer_thread import Copier
from shared.contracts.kv_exchange import KV_GROUPS_MAX, KvGroupKind, KvHandshake
from tests.support.kv_engines import RankMemory, ReadingRank, Shape, handshake
from tests.unit.connector.test_exchange_core import Engine

SHAPE = Shape()
HONEST = handshake([RankMemory(SHAPE, 0).described(b"holder")], SHAPE)


def with_rank(**fields: Any) -> KvHandshake:
    return replace(HONEST, ranks=[replace(HONEST.ranks[0], **fields)])


def with_group(**fields: Any) -> KvHandshake:
    return replace(HONEST, groups=[replace(HONEST.groups[0], **fields)])


def with_layer(**fields: Any) -> KvHandshake:
    first, *others = HONEST.ranks[0].layers
    return with_rank(layers=[replace(first, **fields), *others])


def with_plane(**fields: Any) -> KvHandshake:
    first, *others = HONEST.ranks[0].layers[0].planes
    return with_layer(planes=[replace(first, **fields), *others])


(LAYER, *_), (PLANE, *_) = HONEST.ranks[0].layers, HONEST.ranks[0].layers[0].planes
FORGED = [
    ("epoch", replace(HONEST, epoch=-1)),
    ("epoch", replace(HONEST, epoch=1 << 62)),
    ("clock_s", replace(HONEST, clock_s=math.nan)),
    ("clock_s", replace(HONEST, clock_s=math.inf)),
    ("hash_block_size", replace(HONEST, hash_block_size=0)),
    ("the number of groups", replace(HONEST, groups=[])),
    ("the number of groups", replace(HONEST, groups=HONEST.groups * (KV_GROUPS_MAX + 1))),
    ("alignment", replace(HONEST, alignment=0)),
    ("alignment", replace(HONEST, alignment=HONEST.hash_block_size - 1)),
    ("alignment", replace(HONEST, alignment=1 << 62)),
    ("beyond", replace(HONEST, beyond=-1)),
    ("beyond", replace(HONEST, beyond=1 << 62)),
    ("block_size", with_group(block_size=0)),
    ("window", with_group(window=1)),
    ("window", with_group(kind=KvGroupKind.STATE, window=1)),
    ("window", with_group(kind=KvGroupKind.WINDOW)),
    ("window", with_group(kind=KvGroupKind.WINDOW, window=-1)),
    ("window", with_group(kind=KvGroupKind.WINDOW, window=1 << 62)),
    ("blocks", replace(HONEST, blocks=0)),
    ("blocks", replace(HONEST, blocks=-1)),
    ("blocks", replace(HONEST, blocks=1 << 32)),
    ("the number of ranks", replace(HONEST, ranks=HONEST.ranks * (RANKS_MAX + 1))),
    ("device", with_rank(device="xpu")),
    ("device", with_rank(device="")),
    ("rank", with_rank(rank=-1)),
    ("device_id", with_rank(device_id=-1)),
    ("device_id", with_rank(device_id=1 << 63)),
    ("the length of agent", with_rank(agent=bytes(AGENT_BYTES_MAX + 1))),
    ("the number of layers", with_rank(layers=[])),
    ("the number of layers", with_rank(layers=[LAYER] * (LAYERS_MAX + 1))),
    ("the length of a layer's name", with_layer(name="")),
    ("the length of a layer's name", with_layer(name="n" * (LAYER_NAME_MAX + 1))),
    ("group", with_layer(group=-1)),
    ("group", with_layer(group=1)),
    ("base", with_layer(base=-1)),
    ("base", with_layer(base=0)),
    ("base", with_layer(base=(1 << 64) - 1)),
    ("block_stride", with_layer(block_stride=-1)),
    ("block_stride", with_layer(block_stride=0)),
    ("block_stride", with_layer(block_stride=PLANE.heads * PLANE.head_bytes - 1)),
    ("block_stride", with_layer(block_stride=1 << 63)),
    ("the number of planes", with_layer(planes=[])),
    ("the number of planes", with_layer(planes=[PLANE] * (PLANES_MAX + 1))),
    ("offset", with_plane(offset=-1)),
    ("head_bytes", with_plane(head_bytes=-1)),
    ("head_bytes", with_plane(head_bytes=0)),
    ("total", with_plane(total=0)),
    ("heads", with_plane(heads=0)),
    ("the end of the last block", with_layer(base=ADDRESS_END - 1)),
    ("the end of the last block", with_layer(block_stride=ADDRESS_END // 2)),
    ("the end of the last block", with_plane(offset=ADDRESS_END - LAYER.base)),
]


def test_an_honest_handshake_is_within_its_bounds():
    assert why_malformed(HONEST) == ""


@pytest.mark.parametrize(("field", "forged"), FORGED, ids=[f"{field}-{n}" for n, (field, _) in enumerate(FORGED)])
def test_a_field_out_of_bounds_is_named(field, forged):
    assert why_malformed(forged).startswith(f"{field} is ")


@pytest.mark.parametrize(("field", "forged"), FORGED, ids=[f"{field}-{n}" for n, (field, _) in enumerate(FORGED)])
def test_an_engine_outlives_a_field_out_of_bounds(field, forged):
    """In its scheduler, and on its transfer thread without the scheduler's check."""
    engine = Engine()
    engine.add_peer(forged)
    (refused,) = engine.exchange.notifications().connected
    agent = MemoryNetwork().agent("reader")
    copier = Copier(agent, ReadingRank(RankMemory(SHAPE, 0)).own(agent), lambda: 0.0)
    copier.submit(Orders(connect=[Peer(handshake=forged, clock_ahead_s=0.0)]))
    (lost,) = copier.take_results().connected

    assert refused.failure == lost.failure == why_not(HONEST, forged) != ""
