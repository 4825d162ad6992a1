"""The text of `baton report`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.launcher.views.reports import draw_report
from shared.contracts.planning import DisaggregationReport, ReportBucket

SUMMARY = "Disaggregation pays off: 78% of the requests are served better with separate prefill and decode workers."
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
    reason="about equal, and aggregated serving is simpler",
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
    reason="batch sizes have hardly varied, so the cost of a larger batch is not known",
)


def drawn(report: DisaggregationReport, columns: int = 80) -> str:
    out = io.StringIO()
    draw_report(report, Console(file=out, width=columns))
    return out.getvalue()


@pytest.mark.parametrize("columns", [80, 160])
def test_it_compares_both_modes_and_gives_the_reasons(columns: int):
    text = drawn(DisaggregationReport(seconds=600, buckets=[NO, UNSURE], summary=SUMMARY), columns)

    assert max(map(len, text.splitlines())) <= columns
    flat = " ".join(text.split())
    assert flat.startswith(SUMMARY)
    for text in ("1 to 255 disaggregated 1,256 45 ms 8.8 ms 1.70 s no", "aggregated, measured 120 31 ms 9.1 ms 1.69 s"):
        assert text in flat
    for text in ("16,384 or more disaggregated 12 2.20 s 10 ms 4.00 s unsure", "aggregated, unknown 0 - - -"):
        assert text in flat
    assert "1 to 255: no, about equal, and aggregated serving is simpler." in flat
    assert "the cost of a larger batch is not known." in flat
    assert "…" not in flat


def test_without_requests_there_is_advice():
    text = drawn(DisaggregationReport(seconds=600, summary="No requests were served recently."))

    assert "last 10 minutes. Send some and try again." in " ".join(text.split())
