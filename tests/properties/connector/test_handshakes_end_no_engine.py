"""Whatever numbers a handshake has, it is refused with a reason, or all that is computed from it can be read."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.layout.routes import ReaderRank, routes_to, spans_of
from connector.layout.tensors import why_not
from connector.messages import Orders, Peer
from connector.transfer.memory_agent import MemoryNetwork
from connector.worker.transfer_thread import Copier
from shared.contracts.kv_exchange import KvHandshake
from tests.support.kv_engines import RankMemory, ReadingRank, Shape, handshake, memories

NUMBERS = st.one_of(
    st.integers(-2, 5),
    st.integers(0, 64).map(lambda bits: (1 << bits) - 1),
    st.integers(0, 63).map(lambda bits: 1 << bits),
    st.integers(-(1 << 63), (1 << 64) - 1),
)
OTHERS = st.one_of(NUMBERS, st.text(max_size=8), st.binary(max_size=40), st.floats(), st.just([]))
EXAMPLES = 200


def paths(value: object, path: tuple = ()) -> list[tuple]:
    """Of all values in it, also of the lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, one in inside for found in paths(one, (*path, key)))]


def numbers(tree: dict) -> list[tuple]:
    """Paths of the numbers of which addresses are computed."""
    return [path for path in paths(tree) if path[-1:] in {("base",), ("block_stride",), ("offset",), ("blocks",)}]


@st.composite
def mutated(draw: st.DrawFn) -> KvHandshake | None:
    """None: it is no handshake any more, which the bus refuses."""
    shape = draw(
        st.sampled_from([Shape(), Shape(ranks=2), Shape(cut=1), Shape(dims="KBHNC"), Shape(dims="BLHNC", blocks=3)])
    )
    ranks = [memory.described(b"holder") for memory in memories(shape)]
    tree = msgspec.to_builtins(handshake(ranks, shape), builtin_types=(bytes,))
    chosen = st.one_of(st.sampled_from(numbers(tree)), st.sampled_from(paths(tree)[1:]))
    for path in draw(st.lists(chosen, min_size=1, max_size=2)):
        place = tree
        try:
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = draw(NUMBERS if isinstance(place[path[-1]], int) else OTHERS)
        except (LookupError, TypeError):
            continue  # An earlier mutation took it away.
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(tree), type=KvHandshake)
    except (msgspec.DecodeError, OverflowError):
        return None


@settings(max_examples=EXAMPLES)
@given(mutated(), st.sampled_from([Shape(), Shape(dims="KBHNC"), Shape(ranks=2), Shape(cut=2)]))
def test_a_handshake_is_refused_or_can_be_read_with(peer, shape):
    if peer is None:
        return
    memory = RankMemory(shape, 0)
    own = handshake([memory.described()], shape)
    reason = why_not(own, peer, is_whole=False)
    if reason:
        return
    for route in routes_to(ReaderRank(own.ranks[0], shape.ranks), peer):
        remote, _ = spans_of(route, [0, peer.blocks - 1], [0, 1])
        assert all(0 < address < address + length <= 1 << 63 for address, length, _ in remote.tolist())


@settings(max_examples=EXAMPLES)
@given(mutated())
def test_a_transfer_thread_reports_each_handshake_once(peer):
    if peer is None:
        return
    agent = MemoryNetwork().agent("reader")
    copier = Copier(agent, ReadingRank(RankMemory(Shape(), 0)).own(agent), lambda: 0.0)

    copier.submit(Orders(connect=[Peer(handshake=peer, clock_ahead_s=0.0)]))

    assert [bool(one.failure) for one in copier.take_results().connected] == [True], "there is no such holder"
