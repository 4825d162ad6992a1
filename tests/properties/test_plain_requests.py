"""What is read without the full parser is read as the full parser reads it."""

from __future__ import annotations

import httptools
from hypothesis import given
from hypothesis import strategies as st

from shared.http.plain_requests import PlainRequests

PATH = b"/v1/completions"
PLAIN = PlainRequests({PATH: PATH.decode()})

usual = st.sampled_from([
    b"Host: localhost:8000", b"content-type: application/json", b"Accept:*/*", b"User-Agent: a b (c)", b"X-Empty:",
    b"connection: keep-alive", b"authorization: Bearer abc", b"x-odd: \xe9\t\xff",
])  # fmt: skip
odd = st.sampled_from([
    b"Transfer-Encoding: chunked", b"Connection: close", b"Connection: Upgrade", b"Upgrade: h2c", b"Expect: 100-continue",
    b"content-length: 3", b"Content-Length: +3", b"Content-Length: 03", b"X-A : b", b" folded", b"X-Nul: \0", b"X: a\rb",
    b"X:  two", b"X: a ", b"no colon", b": no name", b"TE: trailers", b"Proxy-Connection: close", b"X-Bare: a\nY: b",
])  # fmt: skip
bodies = st.binary(max_size=12)


class Parsed:
    """What the full parser reads of one request."""

    def __init__(self, data: bytes) -> None:
        self.headers, self.url, self.body, self.complete, self.more = [], b"", b"", 0, False
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.complete = -1
        else:
            self.head = parser.get_method(), parser.get_http_version(), bool(parser.should_keep_alive())

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete += 1


@st.composite
def requests(draw):
    body = draw(bodies)
    lines = draw(st.lists(usual, max_size=6)) + draw(st.lists(odd, max_size=1))
    lines.append(b"content-length: %d" % (len(body) + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))))
    line = draw(
        st.sampled_from([b"POST /v1/completions HTTP/1.1"] * 6 + [b"POST /v1/completions HTTP/1.0", b"GET / HTTP/1.1"])
    )
    return b"\r\n".join([line, *draw(st.permutations(lines)), b"", body])


@given(requests())
def test_plain_requests_are_read_as_the_full_parser_reads_them(data):
    plain = PLAIN.read(data)

    if plain is not None:
        path, headers, body = plain
        parsed = Parsed(data)
        assert (parsed.complete, parsed.url, parsed.body) == (1, PATH, body)
        assert parsed.head == (b"POST", "1.1", True)
        assert (parsed.headers, path) == (headers, PATH.decode())


@given(requests(), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=3))
def test_one_changed_byte_is_read_no_other_way(data, changes):
    changed = bytearray(data)
    for at, byte in changes:
        changed[at % len(changed)] = byte

    test_plain_requests_are_read_as_the_full_parser_reads_them.hypothesis.inner_test(bytes(changed))


def test_what_clients_send_is_read():
    for head in (
        b"Host: 127.0.0.1:8000\r\nUser-Agent: curl/7.88.1\r\nAccept: */*\r\nContent-Type: application/json\r\nContent-Length: 2",
        b"host: a\r\naccept-encoding: gzip, deflate\r\nconnection: keep-alive\r\nauthorization: Bearer x\r\ncontent-length: 2",
    ):
        plain = PLAIN.read(b"POST /v1/completions HTTP/1.1\r\n%b\r\n\r\n{}" % head)
        assert plain is not None
        assert plain[2] == b"{}"


def test_keys_are_not_kept_in_memory():
    reader = PlainRequests({PATH: PATH.decode()})

    reader.read(
        b"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer secret\r\nX-Api-Key: secret\r\ncontent-length: 0\r\n\r\n"
    )

    assert not any(b"secret" in line for line in reader._known)
