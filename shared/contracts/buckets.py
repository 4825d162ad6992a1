"""Names of a key-value bucket in NATS. A value is written to ``$KV.{bucket}.{key}``; when JetStream has stored it, the
server itself publishes it again on ``stored.{bucket}.{key}``, to which no party may publish.
"""

from __future__ import annotations

from typing import Any

from shared.contracts.channels import CHANNELS, Channel, Delivery

KEY_VALUE_CHANNELS = [row for row in CHANNELS.values() if row.delivery is Delivery.KEY_VALUE]


def bucket_of(channel: Channel[Any]) -> str:
    """The bucket of a KEY_VALUE channel."""
    return channel.subject.partition(".")[0]


def key_of(address: str) -> str:
    """The key in an address or filter of a KEY_VALUE channel."""
    return address.partition(".")[2]


def stream_of(bucket: str) -> str:
    """The name of the bucket's JetStream stream."""
    return f"KV_{bucket}"


def written_subject(bucket: str, key: str) -> str:
    """Where the key's values are published, to be stored."""
    return f"$KV.{bucket}.{key}"


def stored_subject(bucket: str, key: str) -> str:
    """Where the server publishes what it has stored under the key."""
    return f"stored.{bucket}.{key}"


def api_subject(verb: str, bucket: str) -> str:
    """JetStream's API for the bucket's stream: ``verb`` is STREAM.INFO, for example."""
    return f"$JS.API.{verb}.{stream_of(bucket)}"
