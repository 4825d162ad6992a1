"""The diagram of a worker's life is generated from the table."""

import os
from pathlib import Path

from services.orchestrator.lifecycle import diagram
from tests.support.fleet_builders import record

DRAWING = Path(__file__).parents[3] / "docs" / "lifecycle.mmd"


def test_the_drawing_in_docs_is_drawn_from_the_table():
    drawn = diagram(record())
    if os.environ.get("REWRITE"):
        DRAWING.write_text(drawn)

    assert DRAWING.read_text() == drawn, "draw it anew: REWRITE=1 pytest tests/unit/orchestrator"
