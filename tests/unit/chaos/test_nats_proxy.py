"""A line to NATS passes whole messages on, in order, and loses only what it is told to lose."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nightly.chaos.nats_proxy import Stream, Trouble

FROM_NATS = [
    b'INFO {"max_payload":1}\r\n',
    b"MSG leg.w1.start 7 5\r\nhello\r\n",
    b"PING\r\n",
    b"HMSG frames.r1 8 INBOX.1 12 17\r\nNATS/1.0\r\n\r\nhello\r\n",
    b"MSG $KV.workers.w1 9 $JS.ACK.1 2\r\n\r\n\r\n",
    b"MSG kv.w1.events 3 0\r\n\r\n",
]
TO_NATS = [b"SUB leg.w1.start 7\r\n", b"PUB frames.r1 2\r\nhi\r\n", b"HPUB worker.w1.load 4 6\r\n\r\n\r\nhi\r\n"]


@given(operations=st.lists(st.sampled_from(FROM_NATS + TO_NATS)), cuts=st.lists(st.integers(0, 400)))
def test_all_bytes_pass_in_order_however_they_are_cut(operations, cuts):
    data = b"".join(operations)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    stream = Stream(Trouble())

    passed = [stream.passed(data[start:end]) for start, end in itertools.pairwise(edges)]

    assert b"".join(passed) == data


@pytest.mark.parametrize("operations", [FROM_NATS, TO_NATS])
def test_what_is_lost_is_lost_whole_and_jetstream_is_spared(operations):
    trouble = Trouble()
    trouble.lost_share = 1.0
    spared = (b"INFO", b"PING", b"SUB", b"MSG $")

    passed = Stream(trouble).passed(b"".join(operations))

    assert passed == b"".join(one for one in operations if one.startswith(spared))
    assert trouble.lost == sum(not one.startswith(spared) for one in operations)
