"""The collector's verdict as a person sees it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.launcher.views.disaggregation_report import draw
from shared.contracts.disaggregation_report import DisaggregationReport, ReportBucket

WORDS = "It is worth it: 78% of the requests are better served with prefill and decode apart."
NO = ReportBucket(
    model="m",
    tokens_min=1,
    tokens_max=255,
    disaggregated=1256,
    aggregated=120,
    ttft_s=0.045,
    itl_s=0.0088,
    e2e_s=1.7,
    other_ttft_s=0.031,
    other_itl_s=0.0091,
    other_e2e_s=1.69,
    measured=True,
    worth="no",
    why="about the same, and one engine for both is simpler",
)
UNSURE = ReportBucket(
    model="a-model-with-a-rather-long-name/as-they-have-them-at-hugging-face-instruct-2507-fp8",
    tokens_min=16384,
    tokens_max=(1 << 31) - 1,
    disaggregated=12,
    ttft_s=2.2,
    itl_s=0.01,
    e2e_s=4.0,
    worth="unsure",
    why="batches have hardly varied, so nobody can tell what a larger one costs",
)


def drawn(told: DisaggregationReport, columns: int = 80) -> str:
    out = io.StringIO()
    draw(told, Console(file=out, width=columns))
    return out.getvalue()


@pytest.mark.parametrize("columns", [80, 160])
def test_it_says_what_is_and_what_would_be_and_why(columns: int):
    text = drawn(DisaggregationReport(seconds=600, buckets=[NO, UNSURE], words=WORDS), columns)

    assert max(map(len, text.splitlines())) <= columns
    flat = " ".join(text.split())
    assert flat.startswith(WORDS)
    for words in ("1 to 255 apart 1,256 45 ms 8.8 ms 1.70 s no", "by one measured 120 31 ms 9.1 ms 1.69 s"):
        assert words in flat
    for words in ("16,384 and more apart 12 2.20 s 10 ms 4.00 s unsure", "by one not known 0 - - -"):
        assert words in flat
    assert "1 to 255: no, about the same, and one engine for both is simpler." in flat
    assert "nobody can tell what a larger one costs." in flat


def test_without_requests_there_is_advice():
    text = drawn(DisaggregationReport(seconds=600, words="Nothing was served lately."))

    assert "last 10 minutes: send requests, and ask again" in " ".join(text.split())
