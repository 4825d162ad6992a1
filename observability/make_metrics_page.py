"""Writes docs/METRICS.md from ``shared.telemetry.names``: ``python -m observability.make_metrics_page``."""

from __future__ import annotations

from pathlib import Path

from shared.telemetry.names import METRICS

PAGE = Path(__file__).parents[1] / "docs" / "METRICS.md"
HEAD = """# Metrics

Routers serve their metrics at `/metrics`. The metrics collector serves those of workers and fleet, and also pushes them
as OTLP when `BATON_OTLP_ENDPOINT` is set, except those under vLLM's names (`vllm:...`). This page is generated from
`shared/telemetry/names.py` (`python -m observability.make_metrics_page`).

Lines of batches count as requests and with their tokens, but not in times to the first token, between tokens and of
requests, nor as goals: no user waits for them.

| metric | kind | labels | meaning |
|---|---|---|---|
"""


def page() -> str:
    rows = [
        f"| `{metric.name}` | {metric.kind.value} | {', '.join(metric.labels)} | {metric.meaning} |\n"
        for metric in METRICS.values()
    ]
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
