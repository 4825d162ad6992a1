"""Compressed bodies: what each encoding gives, and that no small body becomes a large one."""

from __future__ import annotations

import gzip
import zlib

import pytest
import zstandard

from shared.http.encodings import BadEncoding, BodyTooLarge, UnknownEncoding, decoded, encodings_of

TEXT = b'{"model": "m"}' * 100


def raw_deflate(data: bytes) -> bytes:
    deflating = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflating.compress(data) + deflating.flush()


def zstd_in_frames(data: bytes) -> bytes:
    return zstandard.compress(data[:70]) + zstandard.ZstdCompressor(write_content_size=False).compress(data[70:])


ENCODED = {
    "gzip": [gzip.compress, lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:])],
    "x-gzip": [gzip.compress],
    "deflate": [zlib.compress, raw_deflate],
    "zstd": [zstandard.compress, zstd_in_frames],
}
CASES = [(name, encode) for name, several in ENCODED.items() for encode in several]


@pytest.mark.parametrize(("name", "encode"), CASES)
def test_each_encoding_gives_the_body_back(name, encode):
    assert decoded(encode(TEXT), encodings_of(name.upper()), len(TEXT)) == TEXT


@pytest.mark.parametrize(("name", "encode"), CASES)
def test_a_body_that_grows_beyond_its_bound_is_refused(name, encode):
    with pytest.raises(BodyTooLarge):
        decoded(encode(TEXT), [name], len(TEXT) - 1)


@pytest.mark.parametrize(("name", "encode"), CASES)
def test_a_body_that_is_cut_off_or_is_something_else_is_refused(name, encode):
    for wrong in (encode(TEXT)[:-6], b"\x00" + encode(TEXT), TEXT):
        with pytest.raises(BadEncoding):
            decoded(wrong, [name], 1 << 20)


def test_two_encodings_are_undone_in_turn():
    assert decoded(zstandard.compress(gzip.compress(TEXT)), encodings_of("gzip, zstd"), 1 << 20) == TEXT


def test_a_zstd_frame_cannot_ask_for_more_memory_than_every_decoder_has():
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()

    with pytest.raises(BadEncoding):
        decoded(frame.compress(TEXT) + frame.flush(), ["zstd"], 1 << 30)


@pytest.mark.parametrize("value", ["br", "gzip, br", "gzip, gzip, gzip", "x" * 100])
def test_an_encoding_that_is_not_read_is_named(value: str):
    with pytest.raises(UnknownEncoding):
        encodings_of(value)


def test_no_encoding_is_none():
    assert (encodings_of(""), encodings_of("identity"), encodings_of("Identity, ")) == ([], [], [])
