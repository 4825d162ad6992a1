"""The channel table as nats-server permissions: each party may send and hear its own channels and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shared.contracts.channels import CHANNELS, PLACEHOLDER, Channel, Delivery, Party

ANSWER_PARTS_MAX = 4096
ANSWER_S_MAX = 60

_USAGE = """
# In nats-server's own configuration:
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


def inbox_prefix(user: str) -> str:
    """Where answers to this user's asks arrive."""
    return f"_INBOX.{user}"


def permissions() -> str:
    """One block for each party, to be included by nats-server's configuration."""
    return _USAGE + "".join(_block(party) for party in Party)


def may_publish(party: Party) -> list[str]:
    """Subjects that this party may publish to."""
    subjects: list[str] = []
    for channel in CHANNELS.values():
        if channel.delivery is Delivery.KEPT:
            if party in channel.senders:
                subjects.append(f"$KV.{_bucket(channel)}.>")
            if party in channel.senders + channel.receivers:
                subjects += _bucket_api(_bucket(channel))
        elif party in channel.senders:
            subjects.append(channel.filter())
    if any(subject.startswith("$JS.") for subject in subjects):
        subjects += ["$JS.API.INFO", "$JS.FC.>"]
    return _unique(subjects)


def may_subscribe(party: Party) -> list[str]:
    """Subjects that this party may hear."""
    heard = [
        channel.filter()
        for channel in CHANNELS.values()
        if party in channel.receivers and channel.delivery is not Delivery.KEPT
    ]
    return _unique([*heard, f"{inbox_prefix(party.value)}.>"])


def _bucket(channel: Channel[Any]) -> str:
    return PLACEHOLDER.sub("*", channel.subject).partition(".")[0]


def _bucket_api(bucket: str) -> list[str]:
    """What JetStream asks of whoever makes, reads and watches a bucket."""
    stream = f"KV_{bucket}"
    of_stream = [f"$JS.API.STREAM.{verb}.{stream}" for verb in ("CREATE", "UPDATE", "INFO", "MSG.GET")]
    of_consumers = [f"$JS.API.CONSUMER.{verb}.{stream}.>" for verb in ("CREATE", "INFO", "DELETE")]
    return [*of_stream, f"$JS.API.CONSUMER.CREATE.{stream}", *of_consumers]


def _block(party: Party) -> str:
    answers = any(party in row.receivers for row in CHANNELS.values() if row.delivery is Delivery.ASK)
    allow_responses = (
        f'  allow_responses: {{ max: {ANSWER_PARTS_MAX}, expires: "{ANSWER_S_MAX}s" }}\n' if answers else ""
    )
    return (
        f"\n{party.value.upper()}_PERMISSIONS = {{\n"
        f"  publish: {{ allow: [\n{_lines(may_publish(party))}  ] }}\n"
        f"  subscribe: {{ allow: [\n{_lines(may_subscribe(party))}  ] }}\n"
        f"{allow_responses}}}\n"
    )


def _lines(subjects: Iterable[str]) -> str:
    return "".join(f'    "{subject}"\n' for subject in subjects)


def _unique(subjects: list[str]) -> list[str]:
    return list(dict.fromkeys(subjects))
