"""The channel table as nats-server permissions: each party may publish and subscribe to its own channels only.

A subject names the sender, the receiver or both by id (see ``Channel.sent_by``). So a worker with a key of its own can
send in its own name only and receive only its own commands, and can still ask every other worker. All routers are one
party: a router may start a leg on any worker and read its frames, so a key for each of them would protect little.

Only the orchestrator may make or change a key-value bucket, and no party has a consumer or DIRECT.GET: both would
deliver stored bytes to any subject that their user names, with the server's authority. For the same reason no party has
NATS's ``allow_responses``, which lets a party publish to whatever a message names as its reply subject, also its own.
Parties that reply may publish to the reply subjects of those that ask; each ask has a subject that cannot be guessed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from shared.contracts.channels import (
    CHANNELS,
    KEY_VALUE_CHANNELS,
    Channel,
    Delivery,
    Party,
    api_subject,
    bucket_of,
    key_of,
    stored_subject,
    written_subject,
)

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

REPLIES = "a"
"""The token of reply subjects that replies go to: ``{inbox prefix}.{connection}.a.{ask}``."""
BUCKET_MAKER = Party.ORCHESTRATOR

_WORKER_IDS = ("worker_id", "reader_id", "source_id", "sender_id", "instance")
"""Placeholders that stand for a worker where a worker is the end that they name."""


def inbox_prefix(owner: str) -> str:
    """Prefix of the reply subjects of this owner."""
    return f"_INBOX.{owner}"


def reply_subjects(party: Party) -> list[str]:
    """Filters for the subjects of replies to a party, and for those to single owners of it."""
    owners = [owner_of(party), *([owner_of(party, "*")] if party is Party.WORKER else [])]
    return [f"{inbox_prefix(owner)}.*.{REPLIES}.*" for owner in owners]


def owner_of(party: Party, worker_id: str = "") -> str:
    """The owner of a key: a party, or one worker."""
    return f"{party.value}.{worker_id}" if worker_id else party.value


def permissions() -> str:
    """One block for each party, to be included by nats-server's configuration."""
    return _USAGE + "".join(f"\n{party.value.upper()}_PERMISSIONS = {permission_block(party)}\n" for party in Party)


def permission_block(party: Party, worker_id: str = "") -> str:
    """Permissions of a party's key, or of one worker's, in nats-server's configuration syntax."""
    return (
        f"{{\n  publish: {{ allow: [\n{_lines(may_publish(party, worker_id))}  ] }}\n"
        f"  subscribe: {{ allow: [\n{_lines(may_subscribe(party, worker_id))}  ] }}\n}}"
    )


def may_publish(party: Party, worker_id: str = "") -> list[str]:
    """Subjects that this party, or this one worker, may publish to."""
    subjects: list[str] = []
    for channel in CHANNELS.values():
        own = _own(channel.sender_parts, party, worker_id)
        if channel.delivery is Delivery.KEY_VALUE:
            subjects += _of_bucket(channel, party, key_of(channel.filter(**own)))
        elif party in channel.senders:
            subjects.append(channel.filter(**own))
        if channel.delivery is Delivery.ASK and party in channel.receivers:
            subjects += [replies for asker in channel.senders for replies in reply_subjects(asker)]
    return _unique(subjects)


def may_subscribe(party: Party, worker_id: str = "") -> list[str]:
    """Subjects that this party, or this one worker, may subscribe to."""
    heard = [
        channel.filter(**_own(set(channel.parts) - set(channel.sender_parts), party, worker_id))
        for channel in CHANNELS.values()
        if party in channel.receivers and channel.delivery is not Delivery.KEY_VALUE
    ]
    stored = [stored_subject(bucket_of(row), "*") for row in KEY_VALUE_CHANNELS if party in row.receivers]
    return _unique([*heard, *stored, f"{inbox_prefix(owner_of(party, worker_id))}.>"])


def _of_bucket(channel: Channel[Any], party: Party, own_key: str) -> list[str]:
    """Where a party publishes to write its own key, to read the bucket, and to make it."""
    bucket, verbs = bucket_of(channel), []
    if party in channel.senders + channel.receivers:
        verbs = ["STREAM.INFO", "STREAM.MSG.GET"]
    if party is BUCKET_MAKER:
        verbs = ["STREAM.INFO", "STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", *verbs]
    written = [written_subject(bucket, own_key)] if party in channel.senders else []
    return written + [api_subject(verb, bucket) for verb in verbs]


def _own(parts: Container[str], party: Party, worker_id: str) -> dict[str, str]:
    """The known values of the placeholders that name this party's end."""
    ids = {"service": party.value, **(dict.fromkeys(_WORKER_IDS, worker_id) if worker_id else {})}
    return {name: value for name, value in ids.items() if name in parts}


def _lines(subjects: Iterable[str]) -> str:
    return "".join(f'    "{subject}"\n' for subject in subjects)


def _unique(subjects: list[str]) -> list[str]:
    return list(dict.fromkeys(subjects))
