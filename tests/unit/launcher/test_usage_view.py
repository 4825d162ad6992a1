"""The sums and texts of `baton usage`."""

from __future__ import annotations

import csv
import io
import json
from datetime import date

import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.launcher.cli import app
from services.launcher.views.usage import NO_KEY, Usage, UsageQuery, draw, parse_day, summed, to_csv, to_jsonl
from shared.contracts.usage import UsageCounts, UsageMonth, entry_id
from shared.text.formats import compact, long_duration

NOW = date(2026, 11, 23)
LONG = "a-model-with-a-rather-long-name/as-they-have-them-at-hugging-face-instruct-2507-fp8"


def month(key="ci", model="m", month="2026-11", *, tenant="acme", budget=0, **days: UsageCounts) -> UsageMonth:
    return UsageMonth(
        entry=entry_id(month, tenant, key, model),
        month=month,
        tenant=tenant,
        key=key,
        model=model,
        days={name[1:]: counts for name, counts in days.items()},
        stored={},
        monthly_tokens=budget,
    )


def counts(number: int) -> UsageCounts:
    return UsageCounts(
        requests=number, failed=1, prompt_tokens=1000 * number, cached_tokens=250 * number, completion_tokens=number,
        prefill_s=0.25 * number, decode_s=number,
    )  # fmt: skip


LEDGER = [
    month(d01=counts(1), d30=counts(2), d99=counts(5), month="2026-10"),
    month(d01=counts(4), d22=counts(8), budget=20_000),
    month(model=LONG, d22=counts(16), budget=20_000),
    month("other", d22=counts(32), tenant="rival"),
    month("", tenant="", d23=counts(64)),
]


def usage(since="2026-11", until="2026-11-23", **query) -> Usage:
    return summed(LEDGER, UsageQuery(since=parse_day(since), until=parse_day(until), **query), NOW)


@pytest.mark.parametrize(
    ("query", "requests"),
    [
        ({}, [64, 16, 12, 32]),
        ({"since": "2026-10-30", "by": "month", "key": "ci", "model": "m"}, [2, 12]),
        ({"since": "2026-11-22", "by": "day"}, [16, 8, 32, 64]),
        ({"key": NO_KEY}, [64]),
        ({"tenant": "rival"}, [32]),
        ({"since": "2026-11-02", "until": "2026-11-21"}, []),
    ],
)
def test_days_are_summed_by_period_key_and_model(query, requests):
    assert [line.counts.requests for line in sorted(usage(**query).lines, key=lambda one: one.period)] == requests


def test_it_reads_only_the_months_of_the_query():
    query = UsageQuery(since=date(2025, 11, 30), until=date(2026, 2, 1))

    assert query.months() == ("2025-11", "2025-12", "2026-01", "2026-02")


@pytest.mark.parametrize("by", ["day", "month", "total"])
def test_the_table_fits_into_80_columns(by):
    out = io.StringIO()
    draw(usage(by=by), Console(file=out, width=80))
    text = out.getvalue()
    flat = " ".join(text.split())

    assert max(map(len, text.splitlines())) <= 80
    assert "acme/ci" in flat
    assert "124 " in flat  # of all rows
    assert "acme/ci: 28,028 of 20,000 tokens, 140%" in flat
    assert NO_KEY in flat


def test_nothing_counted_says_so():
    out = io.StringIO()
    draw(usage(key="nobody"), Console(file=out, width=80))

    assert "No requests were counted." in out.getvalue()


def test_csv_and_json_lines_have_the_same_numbers():
    found = usage(by="day", key="ci", model="m")
    rows = list(csv.DictReader(io.StringIO(to_csv(found))))
    objects = [json.loads(line) for line in to_jsonl(found).splitlines()]

    assert objects[1] == {
        "period": "2026-11-22", "tenant": "acme", "key": "ci", "model": "m", "requests": 8, "failed": 1, "cancelled": 0,
        "prompt_tokens": 8000, "cached_tokens": 2000, "completion_tokens": 8, "prefill_s": 2.0, "decode_s": 8.0,
    }  # fmt: skip
    assert [{name: str(value) for name, value in one.items()} for one in objects] == rows


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--since", "yesterday"), "--since: 'yesterday' is no date"),
        (("--since", "2026-02-30"), "--since: '2026-02-30' is no date"),
        (("--until", "2026-13"), "--until: '2026-13' is no date"),
        (("--since", "2026-11-02", "--until", "2026-11-01"), "--since 2026-11-02 is after --until 2026-11-01"),
        pytest.param(("--nats-url", "nats://127.0.0.1:1"), "does not respond", marks=pytest.mark.slow),
    ],
)
def test_errors_say_what_is_wrong(arguments, said):
    done = CliRunner().invoke(app, ["usage", *arguments])

    assert done.exit_code == 1
    assert said in " ".join(done.output.split())


def test_a_month_ends_on_its_last_day():
    assert parse_day("2026-02", last=True) == date(2026, 2, 28)
    assert parse_day("2026-12", last=True) == date(2026, 12, 31)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (9999, "9,999"), (12_345, "12.3K"), (999_600, "1.00M"), (45_600_000, "45.6M"), (10**15, "1000T")],
)
def test_numbers_are_short(number, text):
    assert compact(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(5, "5.00 s"), (150, "2.5 min"), (7200, "2.0 h"), (4e6, "1,111.1 h")])
def test_long_durations_are_in_minutes_or_hours(seconds, text):
    assert long_duration(seconds) == text
