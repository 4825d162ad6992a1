"""The terminal of all commands. Workers, tenants and clients choose some of the texts that commands show: none of them
may send orders to the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

CONTROLS: Final = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
"""Control characters other than the end of a line, marks of invisible or reversed text, halves of surrogate pairs."""


def harmless(text: str) -> str:
    """The text without what a terminal would obey."""
    return CONTROLS.sub("", text)


class Console(rich.console.Console):
    """Every table, panel and line becomes segments here; orders of rich itself are marked as such."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and CONTROLS.search(segment.text):
                yield Segment(harmless(segment.text), segment.style)
            else:
                yield segment
