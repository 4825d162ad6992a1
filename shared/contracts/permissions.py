"""The channel table as nats-server permissions: each party may send and hear its own channels and nothing else.

A subject names one end of its channel by id: of an event or a kept value whoever says it, of a command or an ask
whoever is meant. So a worker that has a key of its own may speak of itself only and hear only what is meant for it, and
still ask every other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shared.contracts.channels import CHANNELS, PLACEHOLDER, Channel, Delivery, Party

ANSWER_PARTS_MAX = 4096
ANSWER_S_MAX = 60

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
# party cannot read the answers to another.
"""

_SAID_BY_ITS_ID = (Delivery.EVENT, Delivery.KEY_VALUE)
_WORKER_IDS = ("worker_id", "reader_id", "instance")
"""Placeholders that stand for a worker where a worker is the end that the subject names."""


def inbox_prefix(owner: str) -> str:
    """Where answers to this owner's asks arrive."""
    return f"_INBOX.{owner}"


def owner_of(party: Party, worker_id: str = "") -> str:
    """Whose key it is: a party's, or that of one worker alone."""
    return f"{party.value}.{worker_id}" if worker_id else party.value


def permissions() -> str:
    """One block for each party, to be included by nats-server's configuration."""
    return _USAGE + "".join(f"\n{party.value.upper()}_PERMISSIONS = {permission_block(party)}\n" for party in Party)


def permission_block(party: Party, worker_id: str = "") -> str:
    """What a party's key may do, or that of one worker, as nats-server's configuration has it."""
    answers = any(party in row.receivers for row in CHANNELS.values() if row.delivery is Delivery.ASK)
    allow_responses = (
        f'  allow_responses: {{ max: {ANSWER_PARTS_MAX}, expires: "{ANSWER_S_MAX}s" }}\n' if answers else ""
    )
    return (
        f"{{\n  publish: {{ allow: [\n{_lines(may_publish(party, worker_id))}  ] }}\n"
        f"  subscribe: {{ allow: [\n{_lines(may_subscribe(party, worker_id))}  ] }}\n"
        f"{allow_responses}}}"
    )


def may_publish(party: Party, worker_id: str = "") -> list[str]:
    """Subjects that this party may publish to, or this worker alone."""
    subjects: list[str] = []
    for channel in CHANNELS.values():
        own = _own(channel, party, worker_id) if channel.delivery in _SAID_BY_ITS_ID else {}
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
    """Subjects that this party may hear, or this worker alone."""
    heard = [
        channel.filter(**({} if channel.delivery in _SAID_BY_ITS_ID else _own(channel, party, worker_id)))
        for channel in CHANNELS.values()
        if party in channel.receivers and channel.delivery is not Delivery.KEY_VALUE
    ]
    return _unique([*heard, f"{inbox_prefix(owner_of(party, worker_id))}.>"])


def _own(channel: Channel[Any], party: Party, worker_id: str) -> dict[str, str]:
    """The placeholders of a subject that names this party's end, as far as they are known."""
    ids = {"service": party.value, **(dict.fromkeys(_WORKER_IDS, worker_id) if worker_id else {})}
    return {name: value for name, value in ids.items() if name in channel.parts}


def _bucket(channel: Channel[Any]) -> str:
    return PLACEHOLDER.sub("*", channel.subject).partition(".")[0]


def _bucket_api(bucket: str) -> list[str]:
    """What JetStream asks of whoever makes, reads and watches a bucket."""
    stream = f"KV_{bucket}"
    of_stream = [f"$JS.API.STREAM.{verb}.{stream}" for verb in ("CREATE", "UPDATE", "INFO", "MSG.GET")]
    of_consumers = [f"$JS.API.CONSUMER.{verb}.{stream}.>" for verb in ("CREATE", "INFO", "DELETE")]
    return [*of_stream, f"$JS.API.CONSUMER.CREATE.{stream}", *of_consumers]


def _lines(subjects: Iterable[str]) -> str:
    return "".join(f'    "{subject}"\n' for subject in subjects)


def _unique(subjects: list[str]) -> list[str]:
    return list(dict.fromkeys(subjects))
