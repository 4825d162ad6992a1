"""Chained hashes of packed tokens are the same in C and in Python."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.router.tokenize.block_hash import extend_in_python, fastest_extend, pack
from services.router.tokenize.words import IS_COMPILED

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="not built here")

PARENT = bytes(range(32))
TOKENS = st.lists(
    st.one_of(st.integers(0, 30), st.integers(0, 300), st.integers(0, 70_000), st.integers(0, (1 << 64) - 1)),
    max_size=80,
)
SIZES = st.one_of(st.integers(1, 9), st.sampled_from([23, 24, 64, 255, 256, 300]))


def in_c():
    extend = fastest_extend()
    assert extend is not extend_in_python, "this Python's hashlib has no OpenSSL file of its own"
    return extend


def outcome(extend, *given):
    """What it returns, or the kind of its error."""
    try:
        return extend(*given)
    except (TypeError, ValueError) as error:
        return type(error), str(error)


@given(TOKENS, SIZES, st.binary(max_size=100), st.binary(max_size=100), st.binary(min_size=32, max_size=32))
@example([1] * 300, 300, b"\xf6", b"\xf6", PARENT)
@example([1 << 16] * 70_000, 65_536, b"\xf6", b"\xf6", PARENT)
def test_hashes_counts_and_rests_are_equal(tokens, size, first, later, parent):
    packed = pack(tokens)

    hashes, digest, count, rest = extend_in_python(parent, packed, size, first, later)

    assert in_c()(parent, packed, size, first, later) == (hashes, digest, count, rest)
    assert (count, len(hashes)) == (len(tokens), len(tokens) // size)
    assert rest == pack(tokens[len(hashes) * size :])


@given(st.binary(max_size=40), st.integers(1, 4))
@example(b"\x00\x19\x01", 1)
@example(b"\xf6", 1)
@example(b"\x00\x00\x1b", 2)
def test_other_bytes_are_refused_alike(packed, size):
    given = (PARENT, packed, size, b"\xf6", b"\xf6")

    assert outcome(in_c(), *given) == outcome(extend_in_python, *given)


@pytest.mark.parametrize(
    "given",
    [
        (),
        (PARENT, b"", 1, b""),
        (PARENT[1:], b"", 1, b"", b""),
        (PARENT, "", 1, b"", b""),
        (PARENT, b"", "1", b"", b""),
        (PARENT, b"", 1, None, b""),
    ],
    ids=repr,
)
def test_arguments_of_other_kinds_are_refused(given):
    with pytest.raises(TypeError):
        in_c()(*given)


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_without_tokens_is_refused(size):
    with pytest.raises(ValueError, match="a block has no tokens"):
        in_c()(PARENT, b"\x01", size, b"", b"")


def test_a_library_without_openssl_is_refused():
    from services.router.native import _tokenize

    for path in (_tokenize.__file__, "/nowhere/lib.so"):
        with pytest.raises(ImportError, match="no OpenSSL"):
            _tokenize.open_library(path)
