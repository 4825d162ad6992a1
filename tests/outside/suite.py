"""What every foreign suite is here: sources to fetch, a command to run against a URL, and one outcome per test."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

ROOT = Path(__file__).parents[2]
PLUGINS = Path(__file__).parent / "plugins"
FETCH_S_MAX = 1800.0
OWN_OPTIONS = ("-c", "/dev/null", f"--rootdir={PLUGINS}", f"--confcutdir={PLUGINS}")
"""For tests in ``plugins``. Nothing of this repository's other tests: their configuration is not for such an environment."""
TEST_S_MAX = 180
"""For one foreign test; engines on a busy CPU answer a thousand tokens in about half a minute."""
END_S_MAX = 10.0
RAN_TO_ITS_END = frozenset({0, 1, 5})
"""Exit codes of pytest: all passed, some did not, none was left to run."""


class CannotRun(Exception):
    """Why a suite does not run here, for the page."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of one test against one target."""

    test: str
    outcome: str
    """passed, failed or skipped."""
    why: str = ""
    took_s: float = 0.0


@dataclass(frozen=True)
class Target:
    """A server under test."""

    name: str
    url: str
    model_dir: Path
    """The model that it serves, for clients that tokenize."""
    goes_on: bool = False
    """A run of tests that was cut off goes on with those that it had not reached."""
    run_s_max: float = math.inf
    """For one suite, where that is less than the suite's own."""


class Run(msgspec.Struct):
    """What one suite found at one target."""

    outcomes: list[Outcome]
    figures: str = ""
    """Measurements in words, where the suite measures."""
    cut_off: bool = False
    """The deadline or a signal ended it."""
    served: dict[str, int] = {}
    """Requests on P/D by mode, as Baton counts them."""


class Suite(Protocol):
    """One foreign suite. Its folder is its own; what it fetched stays there for the next run."""

    name: str
    what: str
    """One sentence for the page."""
    run_s_max: float
    """Deadline against one target."""

    def fetch(self, folder: Path) -> str:
        """Get the sources and what they need; the version. Raises CannotRun."""
        ...

    def model_names(self, folder: Path) -> set[str]:
        """Names under which its tests ask for the model, besides the served one."""
        return set()

    def run(self, folder: Path, target: Target) -> Run:
        """Run all of it against one server."""
        ...


def command(
    arguments: Sequence[str | Path], log: Path, *, s_max: float, cwd: Path, env: Mapping[str, str] | None = None
) -> int | None:
    """Run it with its output in ``log``: the exit code, or None when the deadline ended it with all that it started."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(s_max)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_tree(process)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and its children."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(END_S_MAX)


def fetched(arguments: Sequence[str | Path], folder: Path, what: str, *, env: Mapping[str, str] | None = None) -> None:
    """Run a command that fetches. Raises CannotRun with the end of what it printed."""
    log = folder / "fetch.log"
    if command(arguments, log, s_max=FETCH_S_MAX, cwd=folder, env=env) != 0:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise CannotRun(f"{what} could not be fetched: {''.join(last)[:300]}")


def environment(folder: Path, *packages: str, on_ours: bool = False) -> Path:
    """A virtual environment with these packages: its Python. ``on_ours``: what this checkout has installed is there too."""
    python = folder / "venv" / "bin" / "python"
    ready = folder / "venv" / "ready"
    if not ready.exists():
        shutil.rmtree(folder / "venv", ignore_errors=True)
        fetched([sys.executable, "-m", "venv", "venv"], folder, "a virtual environment")
        if on_ours:
            site = next((folder / "venv/lib").glob("python3*/site-packages"))
            ours = next((Path(sys.prefix) / "lib").glob("python3*/site-packages"))
            (site / "ours.pth").write_text(f"{ours}\n")
        fetched([python, "-m", "pip", "install", "--quiet", *packages], folder, " ".join(packages))
        ready.touch()
    return python


def version_of(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def source_distribution(folder: Path, package: str, version: str) -> Path:
    """The unpacked source distribution of a pure Python package. Raises CannotRun."""
    unpacked = folder / f"{package}-{version}"
    if not unpacked.is_dir():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        fetched([*pip, f"{package}=={version}"], folder, f"the source distribution of {package}")
        with tarfile.open(folder / f"{package}-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return unpacked


def pytest_run(
    python: Path,
    tests: Sequence[str | Path],
    *,
    cwd: Path,
    folder: Path,
    target: Target,
    s_max: float,
    env: Mapping[str, str],
    plugins: Sequence[str] = (),
    test_s_max: float = TEST_S_MAX,
) -> Run:
    """Run foreign tests under pytest, with one outcome for each that was reached."""
    lines = folder / f"{target.name}.{target.model_dir.name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if not target.goes_on:
        lines.unlink(missing_ok=True)
    log = folder / f"{target.name}.log"
    chosen = [part for plugin in ("outcome_lines", *plugins) for part in ("-p", plugin)]
    options = ["--continue-on-collection-errors", "-p", "no:cacheprovider", f"--timeout={test_s_max:g}"]
    code = command(
        [python, "-m", "pytest", "-q", *chosen, *options, *tests],
        log,
        s_max=min(s_max, target.run_s_max),
        cwd=cwd,
        env={"PYTHONPATH": str(PLUGINS), "OUTCOME_LINES": str(lines), **env},
    )
    if not lines.exists():
        raise CannotRun(f"pytest ended with {code} before any test: see {log}")
    outcomes = [msgspec.json.decode(line, type=Outcome) for line in lines.read_bytes().splitlines()]
    return Run(list({one.test: one for one in outcomes}.values()), cut_off=code not in RAN_TO_ITS_END)


def last_line(log: Path) -> str:
    """Of what a command printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:400] if lines else "no output"


def read_json(path: Path) -> dict[str, Any]:
    """A report that a benchmark wrote."""
    found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return found
