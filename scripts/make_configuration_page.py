"""Writes docs/configuration.md from the services' settings: ``python -m scripts.make_configuration_page [--check]``.

``--check`` writes nothing and fails when the page differs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from services.collector.settings import Settings as CollectorSettings
from services.orchestrator.settings import Settings as OrchestratorSettings
from services.router.settings import Settings as RouterSettings
from services.worker.settings import Settings as WorkerSettings
from shared.contracts.catalogue import docs_of
from shared.runtime.settings import CommonSettings

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

Settings are environment variables, read once at start. A misspelled or wrong variable stops the process, which names
it. An empty variable counts as not set. Containers use the shorter names of
[compose/env.example](../compose/env.example).
This page is generated from the services' `settings.py` (`make catalogue`).

"""
SECTIONS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "All processes": ("BATON_", CommonSettings),
    "Router": ("ROUTER_", RouterSettings),
    "Worker": ("WORKER_", WorkerSettings),
    "Orchestrator": ("ORCHESTRATOR_", OrchestratorSettings),
    "Metrics collector": ("COLLECTOR_", CollectorSettings),
}
DEFAULTS = {"state_dir": "`~/.local/state/baton`", "cache_dir": "`~/.cache/baton`"}
"""Defaults that depend on the user."""


def page() -> str:
    """The page's text."""
    return HEAD + "\n".join(section(title, *of) for title, of in SECTIONS.items())


def section(title: str, prefix: str, settings: type[msgspec.Struct]) -> str:
    """A table of one service's settings."""
    docs: dict[str, str] = {}
    for owner in reversed(settings.__mro__):
        if owner is not msgspec.Struct and issubclass(owner, msgspec.Struct):
            docs |= docs_of(owner)
    rows = []
    for field in msgspec.structs.fields(settings):
        default = DEFAULTS.get(field.name) or default_of(field)
        rows.append(f"| `{prefix}{field.name.upper()}` | {default} | {text_of(docs, field.name)} |")
    return "\n".join([f"## {title}", "", "| variable | default | meaning |", "|---|---|---|", *rows, ""])


def default_of(field: Any) -> str:
    """As a person would write the variable."""
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "" if value is None or value == "" else f"`{value}`"


def text_of(docs: dict[str, str], name: str) -> str:
    """A setting's docstring as table text."""
    return docs.get(name, "").replace("``", "`").replace("|", "\\|")


def main() -> int:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE.name} differs from the settings: run `make catalogue`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
