"""Writes the pages of settings and of metrics: ``python -m scripts.make_pages [--check]``.

``--check`` writes nothing and fails when a file differs. Messages have ``shared.contracts.catalogue``.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
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

A worker's counters and histograms are those of one `role`: when it changes its role, they begin at zero under the new
one, and those of the old one stay as they are. `sum by (worker_id)` is the whole worker.

| metric | kind | labels | meaning |
|---|---|---|---|
"""
SETTINGS_HEAD = """# Configuration

Settings are environment variables, read once at start. A misspelled or wrong variable stops the process, which names
it. An empty variable counts as not set. In compose, some have a shorter name in
[compose/env.example](../compose/env.example). Variables that earlier versions had are in
[upgrading.md](upgrading.md#settings-that-are-gone).

The default follows the name in parentheses; without one it is empty. Names in small letters are other settings of the
same process. This page is generated from the services' `settings.py` (`make catalogue`).

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
CHANGE = "Change it when "


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
    """One service's settings by subject: what each does, its default, and when to change it."""
    docs, subjects, lines = docs_of(settings), subjects_of(settings), [f"## {title}"]
    for field in msgspec.structs.fields(settings):
        what, when, why = docs.get(field.name, "").replace("``", "`").partition(CHANGE)
        if not (what.strip() and when and why):
            raise ValueError(f"{prefix}{field.name.upper()} needs a docstring with what it does and {CHANGE!r}")
        if field.name in subjects:
            lines += ["", f"**{subjects[field.name]}**", ""]
        default = DEFAULTS.get(field.name) or default_of(field)
        name = f"`{prefix}{field.name.upper()}`" + (f" ({default})" if default else "")
        lines += wrapped(f"* {name}: {what.strip()} *{when.strip()}* {why.strip()}")
    return "\n".join([*lines, ""])


def subjects_of(settings: type[msgspec.Struct]) -> dict[str, str]:
    """The comments that stand alone above a field, by that field: subjects of what follows."""
    pairs = re.findall(r"^    # (.+)\n    (\w+):", inspect.getsource(settings), re.MULTILINE)
    return {name: subject for subject, name in pairs}


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def default_of(field: Any) -> str:
    """As a person would write the variable, with its unit."""
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value is None or value == "":
        return ""
    if re.search(r"_bytes(_max)?$", field.name) and value:
        return f"`{value}` bytes: {value / 1024**2:g} MiB"
    unit = " seconds" if re.search(r"_s(_max|_min)?$", field.name) else ""
    return f"`{value:g}`{unit}" if isinstance(value, float) else f"`{value}`{unit}"


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
