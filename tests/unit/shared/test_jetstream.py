"""What a bucket says when JetStream does not take a value."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from shared.bus.jetstream import BucketStream
from shared.bus.port import AskTimedOut, BusDown


class Silent:
    """A connection to a nats-server whose disk was full: it answers questions, and no writes."""

    async def request(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, timeout_s: float) -> bytes:
        raise AskTimedOut(f"{subject}: no reply within {timeout_s:g} s")


async def test_a_write_without_a_reply_names_the_remedy():
    bucket = BucketStream(Silent(), "files")

    with pytest.raises(BusDown, match=r"no reply within .* after a full disk .* until it is restarted"):
        await bucket.write("key", b"value")
    with pytest.raises(BusDown, match=r"no reply within \d+ s$"):
        await bucket.newest("key")
