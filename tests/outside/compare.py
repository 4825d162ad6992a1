"""Compares what two targets did with the same tests, and finds the reasons of differences that are known."""

from __future__ import annotations

import fnmatch
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.outside.suite import Run

KNOWN = Path(__file__).with_name("known_differences.toml")
NOT_REACHED = "not reached"
"""By one of the two runs."""


@dataclass(frozen=True)
class Difference:
    """One test with two outcomes."""

    test: str
    one_engine: str
    pd: str
    why: str
    """What the target that did not pass it reported."""
    reason: str
    """From the file of known differences; empty when it is not explained."""


@dataclass(frozen=True)
class Comparison:
    """Of one suite."""

    suite: str
    what: str
    version: str
    one_engine: Run
    pd: Run

    def counts(self, run: Run) -> Counter[str]:
        return Counter(outcome.outcome for outcome in run.outcomes)

    def differences(self, known: Path = KNOWN) -> list[Difference]:
        """Tests with different outcomes, whichever target passed them. ``known``: the file of reasons. Of runs that were
        cut off, only tests that both reached.
        """
        first = {outcome.test: outcome for outcome in self.one_engine.outcomes}
        second = {outcome.test: outcome for outcome in self.pd.outcomes}
        reasons = known_reasons_by_suite(known).get(self.suite, {})
        found = []
        cut_off = self.one_engine.cut_off or self.pd.cut_off
        tests = first.keys() & second.keys() if cut_off else first.keys() | second.keys()
        for test in sorted(tests):
            one, pd = first.get(test), second.get(test)
            words = one.outcome if one else NOT_REACHED, pd.outcome if pd else NOT_REACHED
            if words[0] != words[1]:
                why = next((outcome.why for outcome in (pd, one) if outcome and outcome.why), "")
                reason = next((text for pattern, text in reasons.items() if fnmatch.fnmatchcase(test, pattern)), "")
                found.append(Difference(test, *words, why, reason))
        return found

    def unexplained(self) -> list[Difference]:
        return [difference for difference in self.differences() if not difference.reason]

    def neither(self) -> list[tuple[str, str]]:
        """Tests that fail on both, with what P/D reported: they ask for what this model or set-up does not have."""
        failed = {outcome.test for outcome in self.one_engine.outcomes if outcome.outcome == "failed"}
        return [(one.test, one.why) for one in self.pd.outcomes if one.outcome == "failed" and one.test in failed]

    def skipped(self) -> Counter[str]:
        """Reasons of the tests that ran on neither."""
        return Counter(
            one.why.removeprefix("Skipped: ") for one in self.one_engine.outcomes if one.outcome == "skipped"
        )


def known_reasons_by_suite(file: Path) -> dict[str, dict[str, str]]:
    """By suite, reasons by pattern of the test's name."""
    return tomllib.loads(file.read_text())
