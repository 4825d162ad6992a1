"""Writes the pages of settings and of metrics: ``python -m scripts.make_pages [--check]``.

``--check`` writes nothing and fails when a file differs. Messages have ``shared.contracts.catalogue``.
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
from shared.telemetry.names import METRICS

ROOT = Path(__file__).parents[1]
METRICS_HEAD = """# Metrics

Routers serve their metrics at `/metrics`. The metrics collector serves those of workers and fleet, and also pushes them
as OTLP when `BATON_OTLP_ENDPOINT` is set, except those under vLLM's names (`vllm:...`). This page is generated from
`shared/telemetry/names.py` (`make catalogue`).

Lines of batches count as requests and with their tokens, but not in times to the first token, between tokens and of
requests, nor as goals: no user waits for them.

| metric | kind | labels | meaning |
|---|---|---|---|
"""
SETTINGS_HEAD = """# Configuration

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


def files() -> dict[str, str]:
    """Each file's path below the root, and its text."""
    return {"docs/configuration.md": settings_page(), "docs/METRICS.md": metrics_page()}


def metrics_page() -> str:
    """A table of all metrics."""
    rows = [
        f"| `{metric.name}` | {metric.kind.value} | {', '.join(metric.labels)} | {metric.meaning} |\n"
        for metric in METRICS.values()
    ]
    return METRICS_HEAD + "".join(rows)


def settings_page() -> str:
    """The settings of all services."""
    return SETTINGS_HEAD + "\n".join(section(title, *of) for title, of in SECTIONS.items())


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
    stale = 0
    for name, text in files().items():
        file = ROOT / name
        if file.exists() and file.read_text() == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"{name} differs from what it is made of: run `make catalogue`", file=sys.stderr)
            stale = 1
        else:
            file.write_text(text)
    return stale


if __name__ == "__main__":
    sys.exit(main())
