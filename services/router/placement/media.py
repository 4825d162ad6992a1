"""Media that an engine would have to fetch: a client could make it read addresses that only the engine can reach.

The engines enforce this themselves, whatever a body looks like (``--allowed-media-domains``). The router tells the
client before an engine is asked, and names the setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

HINT = b'url"'
"""The end of the name of every field that has a URL."""
ESCAPE = b"\\u00"
ESCAPED_HINTS = (b'\\u0075rl"', b'\\u0072l"', b'\\u006c"', b'\\u006C"')
"""The same end where JSON escapes hide some of its letters."""
BEGINNING_CHARS = 64
"""Of a value, from which its type is seen."""
SHOWN_CHARS_MAX = 64
HOST = re.compile(r"https?://([a-z0-9._-]+)(?::[0-9]+)?(?:[/?#][^\s\\]*)?", re.IGNORECASE | re.ASCII)
"""A URL with nothing that parsers read in different ways, such as a user's name or a backslash."""
MEDIA = re.compile(rb'"(?:input_)?(?:image|audio|video|file)(?:_url|_embeds|_pil)?"')
"""The names of types and fields of parts that are media, as vLLM reads them."""
NONE = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    """Fields of all endpoints' bodies that may contain media."""

    messages: msgspec.Raw = NONE
    system: msgspec.Raw = NONE
    input: msgspec.Raw = NONE
    documents: msgspec.Raw = NONE
    items: msgspec.Raw = NONE
    inputs: msgspec.Raw = NONE
    queries: msgspec.Raw = NONE
    query: msgspec.Raw = NONE
    data_1: msgspec.Raw = NONE
    data_2: msgspec.Raw = NONE
    text_1: msgspec.Raw = NONE
    text_2: msgspec.Raw = NONE


class _Part(msgspec.Struct):
    """A message, a part of its content, or the result of a tool."""

    image_url: msgspec.Raw = NONE
    audio_url: msgspec.Raw = NONE
    video_url: msgspec.Raw = NONE
    source: msgspec.Raw = NONE
    content: msgspec.Raw = NONE
    output: msgspec.Raw = NONE


class _Source(msgspec.Struct):
    url: msgspec.Raw = NONE


class ForeignMedia(NamedTuple):
    """A URL that no engine fetches."""

    param: str
    message: str


_body = msgspec.json.Decoder(_Body)
_part = msgspec.json.Decoder(_Part)
_source = msgspec.json.Decoder(_Source)
_elements = msgspec.json.Decoder(list[msgspec.Raw])


def foreign_media(body: bytes, hosts: frozenset[str]) -> ForeignMedia | None:
    """The first medium that comes neither with the body nor from one of ``hosts``."""
    if not may_have_urls(body):
        return None
    try:
        for value in msgspec.structs.astuple(_body.decode(body)):
            for param, url in _urls(value):
                if not _is_allowed(url, hosts):
                    return ForeignMedia(param, _message(param, url, hosts))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # The engine judges it.
    return None


def has_media(messages: msgspec.Raw) -> bool:
    """Whether parts of these messages may be media: a quick look that takes a text in quotes for text."""
    return MEDIA.search(memoryview(messages)) is not None


def has_addresses(messages: msgspec.Raw) -> bool:
    """Whether an engine must fetch a medium of these messages."""
    if not may_have_urls(bytes(messages)):
        return False
    try:
        return any(url[:5].lower() != "data:" for _param, url in _urls(messages))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # The engine judges it.


def may_have_urls_in_python(body: bytes) -> bool:
    """A quick look, because reading all parts of a long conversation takes milliseconds. ``native/url_fields.c`` takes
    a tenth of the time.
    """
    return HINT in body or (ESCAPE in body and any(hint in body for hint in ESCAPED_HINTS))


try:
    from services.router.native._tokenize import may_have_urls
except ImportError:
    may_have_urls = may_have_urls_in_python


def _urls(value: msgspec.Raw) -> Iterator[tuple[str, str]]:
    """The URLs of a part, or of parts, and of those inside."""
    first = _first(value)
    if first == b"[":
        for element in _elements.decode(value):
            yield from _urls(element)
    if first != b"{":
        return
    part = _part.decode(value)
    for name in ("image_url", "audio_url", "video_url", "source"):
        if url := _url(getattr(part, name)):
            yield name, url
    yield from _urls(part.content)
    yield from _urls(part.output)


def _url(value: msgspec.Raw) -> str:
    """A URL, or the URL of an object."""
    if _first(value) == b"{":
        value = _source.decode(value).url
    return msgspec.json.decode(value, type=str) if _first(value) == b'"' else ""


def _first(value: msgspec.Raw) -> bytes:
    return bytes(memoryview(value)[:BEGINNING_CHARS]).lstrip()[:1]


def _is_allowed(url: str, hosts: frozenset[str]) -> bool:
    if url[:5].lower() == "data:":
        return True
    match = HOST.fullmatch(url)
    return match is not None and match[1].lower() in hosts


def _message(param: str, url: str, hosts: frozenset[str]) -> str:
    allowed = f" or come from {', '.join(sorted(hosts))}" if hosts else ""
    return (
        f"`{param}` must be a `data:` URL, with the medium in base64{allowed}; it is {url[:SHOWN_CHARS_MAX]!r}. The "
        "operator of this service can allow further hosts with BATON_MEDIA_DOMAINS."
    )
