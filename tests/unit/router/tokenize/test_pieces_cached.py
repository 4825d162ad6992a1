"""The cache of tokenized pieces stays within its bound, and drops what was not used lately."""

from __future__ import annotations

from services.router.tokenize.segments import NODE_BYTES_COUNTED, SPARED_MAX, Nodes

PIECE = "x" * 10


def full_of(count: int) -> Nodes:
    """With pieces of the parents 1 to ``count``; the next one is too much."""
    nodes = Nodes((NODE_BYTES_COUNTED + len(PIECE)) * count)
    for parent in range(1, count + 1):
        put(nodes, parent)
    return nodes


def put(nodes: Nodes, parent: int) -> None:
    nodes.put(parent, PIECE, "|", tokens=3, hashes=[], digest=None, tail=b"")


def kept(nodes: Nodes, parents: range) -> list[int]:
    return [parent for parent in parents if nodes.get_again(parent, PIECE + "|", 0) is not None]


def test_the_oldest_piece_that_was_not_used_is_evicted():
    nodes = full_of(4)
    assert nodes.get(1, PIECE, "|") is not None
    assert nodes.get_again(2, f"{PIECE}|", 0) is not None

    put(nodes, 5)

    assert kept(nodes, range(1, 6)) == [1, 2, 4, 5]
    assert nodes.get(3, PIECE, "|") is None


def test_a_use_spares_a_piece_once():
    nodes = full_of(3)
    nodes.get(1, PIECE, "|")

    for parent in (4, 5, 6, 7):
        put(nodes, parent)

    assert 1 not in kept(nodes, range(1, 8))


def test_eviction_is_quick_when_all_pieces_are_used():
    count = 10 * SPARED_MAX
    nodes = full_of(count)
    kept(nodes, range(1, count + 1))

    put(nodes, count + 1)

    assert kept(nodes, range(1, count + 2)) == [parent for parent in range(1, count + 2) if parent != SPARED_MAX + 1]


def test_a_piece_is_found_again_only_before_what_it_was_cut_behind():
    nodes = full_of(1)

    assert nodes.get_again(1, f"{PIECE}|", 0) is not None
    assert nodes.get_again(1, f"ab{PIECE}|c", 2) is not None
    assert nodes.get_again(1, f"{PIECE}y", 0) is None
    assert nodes.get_again(2, f"{PIECE}|", 0) is None


def test_a_piece_that_both_threads_tokenize_is_stored_once():
    nodes = full_of(2)
    first = nodes.get(1, PIECE, "|")

    put(nodes, 1)

    assert nodes.get(1, PIECE, "|") is first
    assert kept(nodes, range(1, 3)) == [1, 2]
