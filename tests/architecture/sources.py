"""The project's own modules, parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared", "services", "connector", "replay")


@dataclass(frozen=True)
class Source:
    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def imports(self) -> Iterator[tuple[str, int]]:
        """Every imported module, with names taken from a package counted as modules too, and the line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    yield name.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                yield base, node.lineno
                for name in node.names:
                    yield f"{base}.{name.name}", node.lineno


@cache
def sources() -> tuple[Source, ...]:
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            text = file.read_text()
            found.append(Source(str(file.relative_to(ROOT)), text, ast.parse(text)))
    return tuple(found)
