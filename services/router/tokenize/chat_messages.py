"""Messages of a chat, as far as templates of plain chats see them."""

from __future__ import annotations

from typing import Any

import msgspec


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str = ""
    text: str | None = None


class Message(msgspec.Struct):
    """A message of a chat, as far as templates of plain chats see it."""

    role: str
    content: str | list[str | Part] | None = None
    name: Any = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")
    reasoning: msgspec.Raw = msgspec.Raw(b"")
