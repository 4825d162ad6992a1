"""Writes the Grafana dashboards: ``python -m observability.grafana.make_dashboards``.

The ``page_*`` modules define the panels; edit those, not the JSON files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from observability.grafana.page_fleet import FLEET
from observability.grafana.page_kv import KV_EXCHANGE
from observability.grafana.page_requests import PLACEMENT, REQUESTS, TENANTS
from observability.grafana.panels import Panel, dashboard, slug

DASHBOARDS = Path(__file__).parent / "dashboards"
PAGES: Mapping[str, Sequence[Panel]] = {
    "Fleet": FLEET,
    "Requests": REQUESTS,
    "KV exchange": KV_EXCHANGE,
    "Placement": PLACEMENT,
    "Tenants": TENANTS,
}


def pages() -> dict[str, str]:
    """File name -> content."""
    return {
        f"{slug(title)}.json": json.dumps(dashboard(title, panels), indent=1) + "\n" for title, panels in PAGES.items()
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (DASHBOARDS / name).write_text(text)
