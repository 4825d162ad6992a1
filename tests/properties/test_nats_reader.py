"""However the bytes of a connection to NATS arrive, each message is taken once, whole and in its subscription's order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.bus.nats_reader import MessageReader, header_block, read_headers

TAKEN = 7
"""The subscription that is listened to; nats-py gets the messages of others."""

names = st.text("abc.-_1", min_size=1, max_size=12)
payloads = st.binary(max_size=40) | st.sampled_from([b"\r\n", b"MSG a 7 3\r\nabc\r\n", b"PING\r\n"])
headers = st.dictionaries(
    st.text("abC-", min_size=1, max_size=5), st.text("xyz 1", max_size=5).map(str.strip), max_size=2
)


class Rest:
    """nats-py's protocol."""

    def __init__(self) -> None:
        self.got = b""

    def data_received(self, data: bytes) -> None:
        self.got += data


@st.composite
def commands(draw):
    """A command as the server sends it, and what is taken of it; None: nats-py gets it."""
    if draw(st.booleans()) and draw(st.booleans()):
        return draw(
            st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'x y'\r\n", b'INFO {"a": 1}\r\n'])
        ), None
    subscription, subject, reply = draw(st.sampled_from([TAKEN, 8])), draw(names), draw(st.just("") | names)
    payload, fields = draw(payloads), draw(headers)
    words = [subject, str(subscription), *([reply] if reply else [])]
    if fields:
        block = header_block(fields)
        line = f"HMSG {' '.join(words)} {len(block)} {len(block) + len(payload)}\r\n".encode() + block
    else:
        line = f"MSG {' '.join(words)} {len(payload)}\r\n".encode()
    taken = (payload, fields, subject) if subscription == TAKEN else None
    return line + payload + b"\r\n", taken


@given(st.lists(commands(), max_size=12), st.lists(st.integers(0, 600), max_size=8))
@example([(b"MSG a 7 2\r\nhi\r\n", (b"hi", {}, "a"))] * 3, [1, 9, 10, 11, 13, 14])
def test_every_message_is_taken_once_and_in_order(sent, cuts):
    taken, rest = [], Rest()
    reader = MessageReader(rest, lambda: None)
    reader.listen(TAKEN, lambda *message: taken.append(message))
    data = b"".join(command for command, _ in sent)
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]

    for begin, end in pairwise(ends):
        reader.data_received(data[begin:end])

    assert taken == [message for _, message in sent if message is not None]
    assert rest.got == b"".join(command for command, message in sent if message is None)


def test_nothing_is_taken_for_a_subscription_that_ended():
    taken, rest = [], Rest()
    reader = MessageReader(rest, lambda: None)
    reader.listen(TAKEN, lambda *message: taken.append(message))
    reader.data_received(b"MSG a 7 1\r\nx\r\n")

    reader.forget(TAKEN)
    reader.data_received(b"MSG a 7 1\r\ny\r\n")

    assert (len(taken), rest.got) == (1, b"MSG a 7 1\r\ny\r\n")


def test_messages_are_taken_as_soon_as_their_subscription_is_listened_to():
    taken, rest = [], Rest()
    reader = MessageReader(rest, lambda: None)
    reader.data_received(b"MSG a 7 1\r\nx\r\n")

    reader.listen(TAKEN, lambda *message: taken.append(message))
    reader.data_received(b"MSG a 7 1\r\ny\r\n")

    assert (taken, rest.got) == ([(b"y", {}, "a")], b"MSG a 7 1\r\nx\r\n")


@pytest.mark.parametrize("line", [b"MSG a 7", b"MSG a 7 -5", b"MSG a 7 b c 1", b"HMSG a 7 1", b"HMSG a 7 1 x"])
def test_a_broken_line_and_all_after_it_go_to_nats_py_which_ends_the_connection(line):
    taken, rest = [], Rest()
    reader = MessageReader(rest, lambda: None)
    reader.listen(TAKEN, lambda *message: taken.append(message))

    reader.data_received(line + b"\r\nMSG a 7 1\r\nx\r\n")

    assert (taken, rest.got) == ([], line + b"\r\nMSG a 7 1\r\nx\r\n")


@given(st.binary(max_size=60).filter(lambda line: b"\n" not in line))
def test_what_is_no_command_goes_to_nats_py(line):
    rest = Rest()
    reader = MessageReader(rest, lambda: None)
    reader.listen(TAKEN, lambda *message: None)

    reader.data_received(b"XMSG " + line + b"\r\n")

    assert rest.got == b"XMSG " + line + b"\r\n"


def test_the_servers_status_is_a_header():
    assert read_headers(b"NATS/1.0 503\r\n\r\n") == {"Status": "503"}
    assert read_headers(b"NATS/1.0 404 No Messages\r\nA: b\r\n\r\n") == {
        "Status": "404",
        "Description": "No Messages",
        "A": "b",
    }
