"""``make outside``: suites of other projects against one engine and against Baton. Leaves with 1 when a difference has no
reason in known_differences.toml.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tests.outside import page
from tests.outside.compare import Comparison
from tests.outside.suite import ROOT, CannotRun, Run, Suite, Target
from tests.outside.suites.clients import LANGCHAIN, LITELLM
from tests.outside.suites.llm_comply import LlmComply
from tests.outside.suites.load_generators import Aiperf, Guidellm
from tests.outside.suites.sdks import ANTHROPIC, OPENAI
from tests.outside.suites.vllm_api import VllmApi
from tests.outside.suites.vllm_bench import VllmBench
from tests.outside.suites.vllm_pd import VllmPd
from tests.outside.targets import ONE_ENGINE, PD, model_folder, modes, one_engine, prefill_and_decode

SUITES: Sequence[Suite] = (
    VllmPd(),
    VllmBench(),
    LANGCHAIN,
    OPENAI,
    ANTHROPIC,
    LlmComply(),
    LITELLM,
    Guidellm(),
    Aiperf(),
    VllmApi(),
)
"""In the order of the page. The short ones come first."""
BY_NAME = {suite.name: suite for suite in SUITES}


class Session:
    """One run of the chosen suites."""

    def __init__(self, suites: Sequence[Suite], scratch: Path, *, goes_on: bool, run_s_max: float) -> None:
        """``goes_on``: with what the latest run has left; ``run_s_max``: of a suite on one target."""
        self._suites = suites
        self._scratch = scratch
        self._goes_on = goes_on
        self._run_s_max = run_s_max
        self.versions: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        """Reasons of the suites that cannot run."""

    def folder(self, suite: Suite) -> Path:
        """Of one suite; those of vLLM's sources share theirs."""
        folder = self._scratch / ("vllm" if suite.name in {"vllm-api", "vllm-pd"} else suite.name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def fetch(self) -> None:
        """Everything from registries, before engines take the memory."""
        for suite in self._suites:
            with self._step(suite, "fetch"):
                self.versions[suite.name] = suite.fetch(self.folder(suite))

    def on_one_engine(self) -> None:
        """All that can run, on one engine. The outcomes stay in the scratch folder."""
        if not (left := self._left(ONE_ENGINE)):
            return
        say("starting one engine")
        with one_engine(self._scratch / ONE_ENGINE, self._names()) as target:
            for suite in left:
                self._run_one(suite, target)

    def find_one_engine(self) -> None:
        """Refuse the suites that have not run on one engine."""
        for suite in self._able():
            with self._step(suite, "read the outcomes of one engine"):
                if self.latest(suite, ONE_ENGINE) is None:
                    raise CannotRun("it has no outcomes of one engine with this model: run it without --again-on-pd")

    def latest(self, suite: Suite, target: str) -> Run | None:
        """What the latest run on this target found."""
        file = self._file(suite, target)
        return msgspec.json.decode(file.read_bytes(), type=Run) if file.exists() else None

    def _file(self, suite: Suite, target: str) -> Path:
        """Of this model only: another one gives other texts."""
        return self._scratch / f"{suite.name}.{target}.{model_folder().name}.json"

    def on_pd(self) -> Iterator[tuple[Suite, Run, Run]]:
        """The same on a prefill and a decode worker, one after the other: its outcomes on one engine and there."""
        if left := self._left(PD):
            say("starting Baton with a prefill and a decode engine")
            with prefill_and_decode(self._scratch / PD, self._names()) as (target, system):
                for suite in left:
                    self._run_one(suite, target, lambda: Counter(modes(system)))
                    yield from self._both(suite)
        for suite in self._able():
            if suite not in left:
                yield from self._both(suite)

    def _both(self, suite: Suite) -> Iterator[tuple[Suite, Run, Run]]:
        one, pd = self.latest(suite, ONE_ENGINE), self.latest(suite, PD)
        if one and pd and suite.name not in self.refused:
            yield suite, one, pd

    def _left(self, target: str) -> list[Suite]:
        """Suites that have to run on this target."""
        ended = [suite for suite in self._able() if (run := self.latest(suite, target)) and not run.cut_off]
        return [suite for suite in self._able() if not (self._goes_on and suite in ended)]

    def _run_one(self, suite: Suite, target: Target, served: Callable[[], Counter[str]] = Counter) -> None:
        """``served``: requests so far, by mode."""
        with self._step(suite, f"run on {target.name}"):
            earlier, before = self.latest(suite, target.name), served()
            target = replace(target, goes_on=self._goes_on, run_s_max=self._run_s_max)
            run = suite.run(self.folder(suite), target)
            run.served = served() - before
            if self._goes_on and earlier:
                run.served += Counter(earlier.served)
            self._file(suite, target.name).write_bytes(msgspec.json.encode(run))
            counts = Counter(outcome.outcome for outcome in run.outcomes)
            say(f"{suite.name}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))

    def _able(self) -> list[Suite]:
        return [suite for suite in self._suites if suite.name not in self.refused]

    def _names(self) -> list[str]:
        return sorted({name for suite in self._able() for name in suite.model_names(self.folder(suite))})

    @contextmanager
    def _step(self, suite: Suite, what: str) -> Iterator[None]:
        started = time.monotonic()
        say(f"{suite.name}: {what}")
        try:
            yield
        except CannotRun as refused:
            self.refused[suite.name] = str(refused)
            say(f"{suite.name}: cannot run: {refused}")
        else:
            say(f"{suite.name}: {what} took {time.monotonic() - started:.0f} s")


def say(text: str) -> None:
    """A line of progress."""
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", flush=True)


def compare(session: Session, out: Path) -> int:
    """Run them on P/D, write the page after each; the number of unexplained differences."""
    unexplained = 0
    for suite, one, pd in session.on_pd():
        result = Comparison(suite.name, suite.what, session.versions[suite.name], one, pd)
        served = ", ".join(f"{count} {mode}" for mode, count in pd.served.items())
        facts = f"Run on {datetime.now(UTC):%Y-%m-%d}; requests on P/D: {served or 'none'}."
        publish(out, suite, page.compared(result, facts))
        unexplained += len(result.unexplained())
        for each in result.unexplained():
            say(f"{suite.name}: unexplained: {each.test}: {each.one_engine}, P/D {each.pd}: {each.why}")
    for name, reason in session.refused.items():
        publish(out, BY_NAME[name], page.not_run(name, BY_NAME[name].what, reason))
    return unexplained


def publish(out: Path, suite: Suite, part: page.Part) -> None:
    page.write(out, {suite.name: part}, BY_NAME)


def main() -> None:
    """Parse, run, tell."""
    parser = argparse.ArgumentParser(prog="outside", description=__doc__)
    parser.add_argument("--only", default=",".join(BY_NAME), help="suites, separated by commas (default: all)")
    parser.add_argument("--list", action="store_true", help="list the suites and exit")
    parser.add_argument("--fetch-only", action="store_true", help="fetch what the suites need and exit")
    parser.add_argument("--again-on-pd", action="store_true", help="compare with the latest run on one engine")
    parser.add_argument("--go-on", action="store_true", help="run only what the latest run has not reached")
    parser.add_argument("--run-s", type=float, default=math.inf, help="seconds after which each run is cut off")
    parser.add_argument("--scratch", type=Path, default=ROOT / ".outside", help="folder for what is fetched, and logs")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/OUTSIDE.md", help="the page to write")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # Everything that was started ends, too.
    if given.list:
        print("\n".join(f"{suite.name:<12} {suite.what}" for suite in SUITES))
        return
    if unknown := set(given.only.split(",")) - BY_NAME.keys():
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; there are {', '.join(BY_NAME)}")
    suites = [suite for suite in SUITES if suite.name in given.only.split(",")]
    session = Session(suites, given.scratch.resolve(), goes_on=given.go_on, run_s_max=given.run_s)
    session.fetch()
    if given.fetch_only:
        return
    try:
        if given.again_on_pd:
            session.find_one_engine()
        else:
            session.on_one_engine()
        unexplained = compare(session, given.page)
    except CannotRun as refused:
        sys.exit(str(refused))
    say(f"{unexplained} unexplained differences; see {given.page}")
    sys.exit(1 if unexplained else 0)


if __name__ == "__main__":
    main()
