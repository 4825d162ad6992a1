"""When a watch of key-value entries reports that it has delivered all initial entries."""

from __future__ import annotations

from collections.abc import AsyncIterator

from nats.js.kv import KeyValue

from shared.bus.nats_kv_store import entries_of


def entry(key: str, pending: int) -> KeyValue.Entry:
    return KeyValue.Entry(bucket="b", key=key, value=b"v", revision=1, delta=pending, created=None, operation=None)


async def told(*says: KeyValue.Entry | None, holds_entries: bool) -> list[str | None]:
    """What comes out when nats-py says this of a bucket that holds entries, or none."""

    async def watcher() -> AsyncIterator[KeyValue.Entry | None]:
        for one in says:
            yield one

    async def has_entries() -> bool:
        return holds_entries

    return [one and one.key async for one in entries_of(watcher(), has_entries)]


async def test_an_empty_bucket_is_reported_at_once():
    assert await told(None, entry("later", 0), holds_entries=False) == [None, "later"]


async def test_entries_come_before_the_end_of_the_beginning():
    assert await told(entry("a", 1), entry("b", 0), None, entry("c", 0), holds_entries=True) == ["a", "b", None, "c"]


async def test_an_early_end_marker_waits_for_the_last_initial_entry():
    assert await told(None, entry("a", 1), entry("b", 0), entry("c", 0), holds_entries=True) == ["a", "b", None, "c"]
