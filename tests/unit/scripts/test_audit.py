"""`make audit` reports known vulnerabilities of the packages, and reports missing data as missing."""

from __future__ import annotations

import json

import pytest

from scripts.audit import NO_DATA, NOTHING_KNOWN, VULNERABLE, Findings, as_text, exit_code, read


def report(*packages: dict) -> str:
    return json.dumps({"dependencies": list(packages), "fixes": []})


GOOD = {"name": "good", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}
UNKNOWN = {"name": "rare", "skip_reason": "Dependency not found and could not be audited: rare (1)"}


@pytest.mark.parametrize(
    ("packages", "code"),
    [
        ([GOOD], NOTHING_KNOWN),
        ([GOOD, BAD], VULNERABLE),
        ([GOOD, UNKNOWN], NO_DATA),
        ([UNKNOWN], NO_DATA),
        ([BAD, UNKNOWN], VULNERABLE),
    ],
)
def test_only_packages_of_which_something_is_known_count_as_good(packages: list[dict], code: int):
    assert exit_code([read(report(*packages), "")]) == code


@pytest.mark.parametrize("said", ["", "Traceback\nConnectionError: no route"])
def test_missing_data_is_not_a_pass(said: str):
    found = read("", said)

    assert exit_code([found]) == NO_DATA
    assert "could not be had" in as_text("services.txt", found)[0]


def test_a_vulnerability_is_listed_with_its_fixed_version():
    lines = as_text("services.txt", read(report(GOOD, BAD, UNKNOWN), ""))

    assert lines == [
        "services.txt: 2 packages audited, 1 vulnerabilities",
        "  bad 1: PYSEC-1, mended in 2",
        "  no data on 1 packages, of which nothing is known: rare",
    ]
    assert exit_code([Findings(audited=1), read(report(BAD), "")]) == VULNERABLE
