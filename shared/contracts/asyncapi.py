"""The channel table as an AsyncAPI 3 document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from shared.contracts.channels import CHANNELS, AskChannel, Channel, Delivery
from shared.contracts.message import WIRE_VERSION

CONTENT_TYPE = "application/msgpack"


def asyncapi() -> str:
    """The document as YAML."""
    names = {name: _camel(name) for name in CHANNELS}
    tops = {message.__name__: message for channel in CHANNELS.values() for message in _messages(channel)}
    _, schemas = msgspec.json.schema_components(tops.values(), ref_template="#/components/schemas/{name}")
    document: dict[str, Any] = {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Baton's bus",
            "version": str(WIRE_VERSION),
            "description": "Messages are msgpack; the schemas describe their content. Types derived from "
            "PackedMessage travel as arrays, in the order of their fields.",
        },
        "defaultContentType": CONTENT_TYPE,
        "servers": {"nats": {"host": "127.0.0.1:4222", "protocol": "nats"}},
        "channels": {names[name]: _channel(channel) for name, channel in CHANNELS.items()},
        "operations": {
            key: value for name, channel in CHANNELS.items() for key, value in _operations(names[name], channel).items()
        },
        "components": {
            "messages": {
                name: {"payload": {"$ref": f"#/components/schemas/{name}"}, "summary": _summary(message)}
                for name, message in sorted(tops.items())
            },
            "schemas": dict(sorted(schemas.items())),
        },
    }
    return "\n".join(_yaml(document)) + "\n"


def _messages(channel: Channel[Any]) -> list[type[msgspec.Struct]]:
    return [channel.message, channel.answer] if isinstance(channel, AskChannel) else [channel.message]


def _channel(channel: Channel[Any]) -> dict[str, Any]:
    subject = f"$KV.{channel.subject}" if channel.delivery is Delivery.KEY_VALUE else channel.subject
    described: dict[str, Any] = {
        "address": subject,
        "description": channel.delivery.value,
        "messages": {
            message.__name__: {"$ref": f"#/components/messages/{message.__name__}"} for message in _messages(channel)
        },
    }
    if channel.parts:
        described["parameters"] = {part: {"description": "one subject token"} for part in channel.parts}
    return described


def _operations(name: str, channel: Channel[Any]) -> dict[str, Any]:
    message = {"$ref": f"#/channels/{name}/messages/{channel.message.__name__}"}
    operations: dict[str, Any] = {}
    for action, parties in (("send", channel.senders), ("receive", channel.receivers)):
        operations[f"{action}{name[0].upper()}{name[1:]}"] = {
            "action": action,
            "channel": {"$ref": f"#/channels/{name}"},
            "messages": [message],
            "tags": [{"name": party.value} for party in parties],
        }
        if isinstance(channel, AskChannel):
            operations[f"{action}{name[0].upper()}{name[1:]}"]["reply"] = {
                "channel": {"$ref": f"#/channels/{name}"},
                "messages": [{"$ref": f"#/channels/{name}/messages/{channel.answer.__name__}"}],
            }
    return operations


def _summary(message: type[msgspec.Struct]) -> str:
    return " ".join((message.__doc__ or "").split())


def _camel(name: str) -> str:
    first, *rest = name.lower().split("_")
    return first + "".join(word.capitalize() for word in rest)


def _yaml(value: Any, indent: str = "") -> Iterator[str]:
    """YAML with JSON scalars, which YAML includes."""
    if isinstance(value, dict):
        for key, inner in value.items():
            name = key if key.isidentifier() else json.dumps(key)
            if isinstance(inner, dict | list) and inner:
                yield f"{indent}{name}:"
                yield from _yaml(inner, indent + "  ")
            else:
                yield f"{indent}{name}: {json.dumps(inner, ensure_ascii=False)}"
        return
    for inner in value:
        if isinstance(inner, dict | list) and inner:
            first, *rest = _yaml(inner, indent + "  ")
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{indent}- {json.dumps(inner, ensure_ascii=False)}"
