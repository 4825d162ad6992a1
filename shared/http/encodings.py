"""Bodies that a client has compressed (``Content-Encoding``), decoded within a bound on the result."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final

import zstandard

ENCODINGS_MAX: Final = 2
GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
RAW_DEFLATE: Final = -zlib.MAX_WBITS
WINDOW_BYTES_MAX: Final = 8 << 20
"""Memory that a zstd frame may ask for: what RFC 8878 has every decoder support."""
ZSTD_PIECE_BYTES: Final = 512
IDENTITY: Final = "identity"


class UnknownEncoding(Exception):
    """No decoder here reads this encoding; the text names it."""


class BodyTooLarge(Exception):
    """The decoded body is larger than its bound."""


class BadEncoding(Exception):
    """The body is not what its headers say."""


def encodings_of(value: str) -> list[str]:
    """The encodings of a Content-Encoding header, in the order in which they were applied. Raises UnknownEncoding."""
    names = [name for part in value.split(",") if (name := part.strip().lower()) not in ("", IDENTITY)]
    for name in names:
        if name not in DECODERS:
            raise UnknownEncoding(name[:40])
    if len(names) > ENCODINGS_MAX:
        raise UnknownEncoding(f"{len(names)} encodings")
    return names


def decoded(body: bytes, encodings: list[str], bytes_max: int) -> bytes:
    """The body without its ``encodings`` (see ``encodings_of``), of at most ``bytes_max`` bytes.

    Raises BodyTooLarge, BadEncoding.
    """
    for name in reversed(encodings):
        body = DECODERS[name](body, bytes_max)
    return body


def _inflated(body: bytes, bytes_max: int, window: int = GZIP_OR_ZLIB) -> bytes:
    """The members of a gzip or zlib body, which follow each other."""
    parts: list[bytes] = []
    left = bytes_max
    while body:
        inflating = zlib.decompressobj(window)
        try:
            part = inflating.decompress(body, left + 1)
        except zlib.error as error:
            raise BadEncoding(str(error)) from None
        left -= len(part)
        if left < 0:
            raise BodyTooLarge
        if not inflating.eof:
            raise BadEncoding("it is cut off")
        parts.append(part)
        body = inflating.unused_data
    return b"".join(parts)


def _deflated(body: bytes, bytes_max: int) -> bytes:
    """``deflate`` means the zlib format (RFC 9110), but some clients send the data without its frame."""
    try:
        return _inflated(body, bytes_max)
    except BadEncoding:
        return _inflated(body, bytes_max, RAW_DEFLATE)


def _zstd(body: bytes, bytes_max: int) -> bytes:
    """The frames of a zstd body. The library cannot bound what a piece becomes, at most 32,768 times its size: so the
    pieces are small.
    """
    parts: list[bytes] = []
    left, at = bytes_max, 0
    inflating: Any = None
    try:
        while at < len(body):
            inflating = inflating or zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).decompressobj()
            part = inflating.decompress(body[at : at + ZSTD_PIECE_BYTES])
            at = min(at + ZSTD_PIECE_BYTES, len(body)) - len(inflating.unused_data)
            left -= len(part)
            if left < 0:
                raise BodyTooLarge
            parts.append(part)
            inflating = None if inflating.eof else inflating
    except zstandard.ZstdError as error:
        raise BadEncoding(str(error)) from None
    if inflating is not None:
        raise BadEncoding("it is cut off")
    return b"".join(parts)


DECODERS: Final[dict[str, Callable[[bytes, int], bytes]]] = {
    "gzip": _inflated,
    "x-gzip": _inflated,
    "deflate": _deflated,
    "zstd": _zstd,
}
