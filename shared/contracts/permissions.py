"""The channel table as nats-server permissions: each party may publish and subscribe to its own channels only.

A subject names the sender, the receiver or both by id (see ``Channel.sent_by``). So a worker with a key of its own can
send in its own name only and receive only its own commands, and can still ask every other worker. All routers are one
party: a router may start a leg on any worker and read its frames, so a key for each of them would protect little.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from shared.contracts.channels import CHANNELS, PLACEHOLDER, Channel, Delivery, Party

REPLY_PARTS_MAX = 4096
REPLY_S_MAX = 60

_USAGE = """
# `baton init` writes all of this for you, with a key for each party and TLS. By hand, with passwords:
#
#   include ./nats/permissions.conf
#   authorization {
#     users: [
#       { user: router, password: $ROUTER_PASSWORD, permissions: $ROUTER_PERMISSIONS }
#       { user: worker, password: $WORKER_PASSWORD, permissions: $WORKER_PERMISSIONS }
#       ... one line for each party below
#     ]
#   }
#
# A process is given BATON_NATS_URL=nats://router:PASSWORD@host:4222. The user's name is part of its inbox, so that one
# party cannot read the replies to another.
"""

_WORKER_IDS = ("worker_id", "reader_id", "source_id", "instance")
"""Placeholders that stand for a worker where a worker is the end that they name."""


def inbox_prefix(owner: str) -> str:
    """Prefix of the reply subjects of this owner."""
    return f"_INBOX.{owner}"


def owner_of(party: Party, worker_id: str = "") -> str:
    """The owner of a key: a party, or one worker."""
    return f"{party.value}.{worker_id}" if worker_id else party.value


def permissions() -> str:
    """One block for each party, to be included by nats-server's configuration."""
    return _USAGE + "".join(f"\n{party.value.upper()}_PERMISSIONS = {permission_block(party)}\n" for party in Party)


def permission_block(party: Party, worker_id: str = "") -> str:
    """Permissions of a party's key, or of one worker's, in nats-server's configuration syntax."""
    replies = any(party in row.receivers for row in CHANNELS.values() if row.delivery is Delivery.ASK)
    allow_responses = f'  allow_responses: {{ max: {REPLY_PARTS_MAX}, expires: "{REPLY_S_MAX}s" }}\n' if replies else ""
    return (
        f"{{\n  publish: {{ allow: [\n{_lines(may_publish(party, worker_id))}  ] }}\n"
        f"  subscribe: {{ allow: [\n{_lines(may_subscribe(party, worker_id))}  ] }}\n"
        f"{allow_responses}}}"
    )


def may_publish(party: Party, worker_id: str = "") -> list[str]:
    """Subjects that this party, or this one worker, may publish to."""
    subjects: list[str] = []
    for channel in CHANNELS.values():
        own = _own(channel.sender_parts, party, worker_id)
        if channel.delivery is Delivery.KEY_VALUE:
            if party in channel.senders:
                subjects.append(f"$KV.{channel.filter(**own)}")
            if party in channel.senders + channel.receivers:
                subjects += _bucket_api(_bucket(channel))
        elif party in channel.senders:
            subjects.append(channel.filter(**own))
    if any(subject.startswith("$JS.") for subject in subjects):
        subjects += ["$JS.API.INFO", "$JS.FC.>"]
    return _unique(subjects)


def may_subscribe(party: Party, worker_id: str = "") -> list[str]:
    """Subjects that this party, or this one worker, may subscribe to."""
    heard = [
        channel.filter(**_own(set(channel.parts) - set(channel.sender_parts), party, worker_id))
        for channel in CHANNELS.values()
        if party in channel.receivers and channel.delivery is not Delivery.KEY_VALUE
    ]
    return _unique([*heard, f"{inbox_prefix(owner_of(party, worker_id))}.>"])


def _own(parts: Container[str], party: Party, worker_id: str) -> dict[str, str]:
    """The known values of the placeholders that name this party's end."""
    ids = {"service": party.value, **(dict.fromkeys(_WORKER_IDS, worker_id) if worker_id else {})}
    return {name: value for name, value in ids.items() if name in parts}


def _bucket(channel: Channel[Any]) -> str:
    return PLACEHOLDER.sub("*", channel.subject).partition(".")[0]


def _bucket_api(bucket: str) -> list[str]:
    """JetStream API subjects to create, read and watch a bucket."""
    stream = f"KV_{bucket}"
    of_stream = [f"$JS.API.STREAM.{verb}.{stream}" for verb in ("CREATE", "UPDATE", "INFO", "MSG.GET")]
    of_consumers = [f"$JS.API.CONSUMER.{verb}.{stream}.>" for verb in ("CREATE", "INFO", "DELETE")]
    return [*of_stream, f"$JS.API.CONSUMER.CREATE.{stream}", *of_consumers]


def _lines(subjects: Iterable[str]) -> str:
    return "".join(f'    "{subject}"\n' for subject in subjects)


def _unique(subjects: list[str]) -> list[str]:
    return list(dict.fromkeys(subjects))
