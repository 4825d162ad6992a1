"""Makes .venv from the locked requirements: once, and again only when a lock has changed.

Run by setup.sh (`make setup`) with the Python that the environment shall have; needs nothing but that Python.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
import time
import venv
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from build_lock import Busy, alone  # This folder is on the path of its scripts.

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = ROOT / ".baton" / "setup.log"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch publishes its CPU builds, for machines whose package index has none."""
LOCKED = ["install", "--no-compile", "--no-deps", "--require-hashes", "--requirement"]
ENGINES = {
    "cpu": "vllm.v1.worker.cpu_worker",
    "cuda": "vllm.v1.worker.gpu_worker",
    "cuda-0.33": "vllm.v1.worker.gpu_worker",  # with this release of vLLM
}
"""Engines that can be installed, by the name of their lock; and the module of vLLM that runs a model."""
PYPI = "https://pypi.org/simple"
LINES_SHOWN_MAX = 15
LARGE_MB = 40
REDRAW_S = 0.25


class SetupFailed(Exception):
    """Said to the user as it is."""


class Unreachable(SetupFailed):
    """The network, or a server there, does not answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dev", action="store_true", help="also install what checks and tests need")
    parser.add_argument(
        "--as-is", action="store_true", help="do not compile the router's request path anew: edited, it runs as Python"
    )
    options = parser.parse_args()
    try:
        engine = wanted_engine()
        if to_do(engine, dev=options.dev, as_is=options.as_is):
            with alone():
                set_up(engine, dev=options.dev, as_is=options.as_is)
    except (SetupFailed, Busy) as failure:
        sys.exit(f"setup: {failure}")
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the next run goes on from here", file=sys.stderr)
        sys.exit(130)


def to_do(engine: str, *, dev: bool, as_is: bool) -> dict[str, str]:
    """Parts that are missing or outdated, with the name of their lock; it is empty for what is compiled."""
    locks = {"runtime": "services" if engine == "none" else f"engine-{engine}"}
    if dev:
        locks["dev"] = "dev"
    # An environment with an engine also does for a setup without one.
    if engine == "none" and installed("runtime") in {wanted(f"engine-{one}") for one in ENGINES}:
        del locks["runtime"]
    missing = {part: lock for part, lock in locks.items() if installed(part) != wanted(lock)}
    compiled = {"native": native_sources()} | ({} if as_is else {"request-path": request_path_sources()})
    return missing | {part: "" for part, sources in compiled.items() if installed(part) != sources}


def set_up(engine: str, *, dev: bool, as_is: bool) -> None:
    """Install what is missing; silent when nothing is, or another process has done it."""
    parts = to_do(engine, dev=dev, as_is=as_is)
    if not parts:
        return
    missing = {part: lock for part, lock in parts.items() if lock}
    started = time.monotonic()
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    if "runtime" in missing:
        check_system(engine)
        say(f"engine: {engine} ({why(engine)})")
        make_venv(engine)
    compiling = None
    for part, lock in missing.items():
        install(lock)
        (VENV / f".{part}").write_text(wanted(lock))
        if part == "runtime":
            compiling = begin_compiling(engine)
    install_baton(native_sources(), "" if as_is else request_path_sources())
    if compiling is not None and compiling.wait() != 0:
        say(f"vLLM cannot be imported; the end of {LOG} says why")
    say(f"ready after {time.monotonic() - started:.0f} s")


def install_baton(sources: str, request_path: str) -> None:
    """Install this package and compile its parts in C; its request path, too, unless ``request_path`` is empty."""
    if request_path:
        say("compiling the router (a minute)")
    environment = {} if request_path else {"BATON_COMPILED": "0"}
    pip(["install", "--no-deps", "--no-build-isolation", "--editable", "."], Progress(1), environment)
    (VENV / ".native").write_text(sources)
    if request_path:
        (VENV / ".request-path").write_text(request_path)
    compiled = [ROOT / "services/router/native" / name for name in ("_block_table", "_placement", "_tokenize")]
    compiled += [ROOT / "shared/request_path__mypyc"] if request_path else []
    if not all(any(one.parent.glob(f"{one.name}.*.so")) for one in compiled):
        say("no C compiler found: the router runs in Python, which is enough for a few workers")


def wanted_engine() -> str:
    """What BATON_ENGINE says, or what the machine has."""
    chosen = os.environ.get("BATON_ENGINE", "")
    if chosen not in {"", "none", *ENGINES}:
        known = ", ".join(ENGINES)
        raise SetupFailed(f"BATON_ENGINE is {chosen!r}; it may be {known} or none (simulated engines only)")
    return chosen or ("cuda" if has_nvidia_gpu() else "cpu")


def has_nvidia_gpu() -> bool:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def why(engine: str) -> str:
    if os.environ.get("BATON_ENGINE"):
        return "BATON_ENGINE says so"
    return "nvidia-smi lists a GPU" if engine == "cuda" else "no NVIDIA GPU found"


def check_system(engine: str) -> None:
    """What pip cannot install, before anything is downloaded."""
    if engine == "cpu":
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError as error:
            raise SetupFailed(
                "vLLM's CPU backend needs the system library libnuma.so.1, which is not here. Install it: "
                "apt-get install libnuma1 (Debian, Ubuntu) or dnf install numactl-libs (Fedora). "
                "Or do without real engines: BATON_ENGINE=none"
            ) from error
    if engine.startswith("cuda") and not (shutil.which("cc") or shutil.which("gcc")):
        say("no C compiler found: vLLM compiles kernels on the GPU machine and will ask for one (apt-get install gcc)")


def wanted(lock: str) -> str:
    """The digest of everything that decides what is installed for this lock."""
    digest = hashlib.sha256(f"{lock} {sys.version_info[:2]}".encode())
    for path in (ROOT / "requirements" / f"{lock}.txt", ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    return f"{lock} {digest.hexdigest()}\n"


def native_sources() -> str:
    """The digest of what the editable install compiles, and of whether it can."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {shutil.which('cc') or shutil.which('gcc')}".encode())
    for path in sorted((ROOT / "services" / "router" / "native").glob("*.[ch]")):
        digest.update(path.read_bytes())
    return f"native {digest.hexdigest()}\n"


def request_path_sources() -> str:
    """The digest of what mypyc compiles, and of how."""
    modules = runpy.run_path(str(ROOT / "shared" / "compiled.py"))["digest"](ROOT)
    how = hashlib.sha256(f"{sys.version_info[:2]} {shutil.which('cc') or shutil.which('gcc')}".encode())
    how.update((ROOT / "setup.py").read_bytes())
    return f"request-path {modules} {how.hexdigest()}\n"


def installed(part: str) -> str:
    stamp = VENV / f".{part}"
    return stamp.read_text() if stamp.exists() and PYTHON.exists() else ""


def make_venv(engine: str) -> None:
    """A fresh environment, unless the one there can be brought up to date."""
    before = installed("runtime").split(" ")[0]
    if before not in {"", "services", f"engine-{engine}"}:
        # The engines share import names, so one cannot be installed over the other.
        say(f"making .venv anew: it holds {before}")
        shutil.rmtree(VENV)
    if not has_pip():
        say(f"making .venv with Python {sys.version.split()[0]} ({sys.executable})")
        venv.EnvBuilder(with_pip=True, clear=VENV.exists(), symlinks=True).create(VENV)
    for stamp in VENV.glob(".runtime"):
        stamp.unlink()


def has_pip() -> bool:
    """Whether there is an environment that was made to its end: pip comes last, its list of files after its files."""
    return PYTHON.exists() and any(VENV.glob("lib/python*/site-packages/pip-*.dist-info/RECORD"))


def install(lock: str) -> None:
    """Exactly what the lock says."""
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    count = len(re.findall(r"^\w.*==", text, flags=re.MULTILINE))
    say(f"installing {count} locked packages (requirements/{lock}.txt)")
    path = f"requirements/{lock}.txt"
    if torch := re.search(r"^torch==\S+\+cpu(?:.*\\\n)*.*\n", text, flags=re.MULTILINE):
        install_cpu_torch(torch[0])
        path = written("without-torch.txt", text.replace(torch[0], ""))
    if not uv(path):
        pip([*LOCKED, path], Progress(count))


def written(name: str, text: str) -> str:
    """The path of a file beside the log with this text."""
    path = LOG.with_name(name)
    path.write_text(text)
    return str(path)


def uv(path: str) -> bool:
    """Whether uv installed the packages of this file, in a tenth of the time that pip takes. It does not read pip's
    configuration and is told the index and the certificates only: on some machines only pip can.
    """
    try:
        pip([*LOCKED, "requirements/uv.txt"], Progress(1))
    except Unreachable:
        raise
    except SetupFailed:
        say("uv cannot be had here: pip installs everything, which takes some minutes")
        return False
    command = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PYTHON), "--no-deps", "--require-hashes"]
    command += ["--requirement", path]
    with LOG.open("a") as log:
        shown = None if sys.stderr.isatty() else log
        done = subprocess.run(command, cwd=ROOT, env=uv_environment(), stdout=log, stderr=shown, check=False)
    if done.returncode != 0:
        say("uv could not install it: pip does, which takes some minutes")
    return done.returncode == 0


def uv_environment() -> dict[str, str]:
    """Ours, with the index and the certificates of pip's configuration unless uv has its own."""
    command = [str(PYTHON), "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    configured = re.findall(r"^(\S*?)\.([a-z-]+)='(.*)'$", listed, flags=re.MULTILINE)
    names = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
    # pip's variables, which its list calls :env:, hold against its files.
    configured.sort(key=lambda one: one[0] == ":env:")
    return {**{names[key]: value for _, key, value in configured if key in names}, **os.environ}


def begin_compiling(engine: str) -> subprocess.Popen[bytes] | None:
    """Compile vLLM's modules by importing them, beside what else is done: all modules of .venv would take much longer,
    and most of them are never imported. The others are compiled by the first process that imports them.
    """
    if engine == "none":
        return None
    say("compiling vLLM's modules")
    imported = ("vllm.entrypoints.launchers.app", "vllm.v1.engine.async_llm", "vllm.v1.engine.core", ENGINES[engine])
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with LOG.open("a") as log:
        return subprocess.Popen([PYTHON, "-c", f"import {', '.join(imported)}"], env=environ, stdout=log, stderr=log)


def install_cpu_torch(locked: str) -> None:
    """First, and alone: only some package indexes have it. Where pip's own has not, PyTorch's is asked; where that
    cannot be reached (behind a mirror of PyPI, say), the ordinary build does, which cannot be imported without the
    libraries of GPUs.
    """
    if installed_version("torch") in {locked.split(maxsplit=1)[0].removeprefix("torch=="), ordinary_torch()}:
        return
    wanted_torch = written("torch.txt", locked)
    try:
        pip([*LOCKED, wanted_torch], Progress(1))
    except SetupFailed as failure:
        if not is_missing(failure):
            raise
        say("pip's package index has no CPU build of torch: asking PyTorch's own")
        try:
            pip([*LOCKED, wanted_torch, "--extra-index-url", TORCH_CPU_INDEX], Progress(1))
        except SetupFailed as again:
            if not (isinstance(again, Unreachable) or is_missing(again)):
                raise
            say("PyTorch's index cannot be had here: taking the ordinary build, with 2 GB of libraries for GPUs")
            if not uv("requirements/torch-pypi.txt"):
                pip([*LOCKED, "requirements/torch-pypi.txt"], Progress(1))


def is_missing(failure: SetupFailed) -> bool:
    """Whether the index has no such package; with constraints of the machine's, pip calls that a conflict."""
    return "No matching distribution" in str(failure) or "ResolutionImpossible" in str(failure)


def ordinary_torch() -> str:
    """The version of torch of the package index that does where its CPU build cannot be had."""
    ordinary = (ROOT / "requirements" / "torch-pypi.txt").read_text()
    return re.findall(r"^torch==(\S+)", ordinary, flags=re.MULTILINE)[0]


def installed_version(package: str) -> str:
    """The version of a package in .venv; empty if it is not there."""
    found = next(VENV.glob(f"lib/python*/site-packages/{package}-*.dist-info"), None)
    return found.name.removeprefix(f"{package}-").removesuffix(".dist-info") if found else ""


def pip(arguments: list[str], progress: Progress, environ: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run pip, telling its progress in a few words; its full output goes to the log."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    last: deque[str] = deque(maxlen=LINES_SHOWN_MAX)
    indexes = [PYPI]
    environment = {**os.environ, "PIP_PROGRESS_BAR": "off", "PIP_ROOT_USER_ACTION": "ignore", **environ}
    with (
        LOG.open("a") as log,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as running,
    ):
        assert running.stdout is not None
        for line in running.stdout:
            log.write(line)
            progress.read(line)
            if line.startswith(INDEXES):
                indexes = line.removeprefix(INDEXES).strip().split(", ")
            if not line.startswith("WARNING: Location"):
                last.append(line.rstrip())
    progress.end()
    if running.returncode != 0:
        if failure := network_failure("\n".join(last), indexes):
            raise Unreachable(f"{failure}. {NETWORK_TODO}\nAll that pip said: {LOG}")
        raise SetupFailed("pip could not install it:\n  " + "\n  ".join(last) + f"\nAll of it: {LOG}")


INDEXES = "Looking in indexes: "
"""pip says so when there is another one than PyPI."""
GIVEN_UP = re.compile(r"Retrying \(Retry\(total=0,.*?\)\) after connection broken by '(.*)': (\S+)")
NOT_READ = re.compile(r"HTTPS?ConnectionPool\(host='([^']+)'.*")
CAUSE = re.compile(r"\[Errno -?\d+\] ([^'\")]+)|(certificate verify failed[^'\")]*)|([Rr]ead timed out|timed out)")
NETWORK_TODO = (
    "Check the network of this machine. Behind a proxy set HTTPS_PROXY=http://HOST:PORT; for a mirror of PyPI set "
    "PIP_INDEX_URL=https://HOST/simple, and PIP_CERT=FILE for its CA. Then repeat the command: it goes on from here."
)


def network_failure(said: str, indexes: list[str]) -> str:
    """What could not be reached, and why, by pip's last lines; empty if the network is not the cause."""
    if given_up := GIVEN_UP.search(said):
        asked, text = given_up[2], given_up[1]
        what = next((each for each in indexes if asked.startswith(urlsplit(each).path.rstrip("/"))), indexes[0])
    elif not_read := NOT_READ.search(said):
        what, text = not_read[1], not_read[0]
    else:
        return ""
    cause = CAUSE.search(text)
    why_not = next(filter(None, cause.groups())) if cause else text
    return f"{what} cannot be reached: {why_not}"


class Progress:
    """pip's lines, told to a person: a counter and a clock on a terminal, a line now and then elsewhere."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen = 0
        self.since = time.monotonic()
        self.text = "asking the package index"
        self.ended = threading.Event()
        if sys.stdout.isatty():
            threading.Thread(target=self.redraw, daemon=True).start()

    def read(self, line: str) -> None:
        if found := re.match(r"(?:Collecting|Requirement already satisfied:) (\S+)", line):
            self.seen += 1
            self.show(f"[{self.seen}/{self.count}] {found[1]}", passing=self.seen % 25 != 0)
        elif found := re.match(r"\s+(?:Downloading|Using cached) (\S+) \(([\d.]+) ([MG]B)\)", line):
            size_mb = float(found[2]) * (1000 if found[3] == "GB" else 1)
            name = found[1].rsplit("/", 1)[-1].split("-cp3")[0]
            self.show(f"[{self.seen}/{self.count}] {name}, {size_mb:.0f} MB", passing=size_mb < LARGE_MB)
        elif line.startswith("Installing collected packages"):
            packages = line.count(",") + 1
            self.show(f"unpacking {packages} packages (a minute or two)", passing=packages == 1)

    def show(self, text: str, *, passing: bool) -> None:
        """``passing`` lines are for terminals only."""
        self.text = text
        if not (passing or sys.stdout.isatty()):
            say(f"  {text}")

    def redraw(self) -> None:
        """Until the end: the newest text, and a clock that shows that something happens."""
        while not self.ended.wait(REDRAW_S):
            sys.stdout.write(f"\r\x1b[2K  {time.monotonic() - self.since:4.0f} s  {self.text}")
            sys.stdout.flush()

    def end(self) -> None:
        self.ended.set()
        if sys.stdout.isatty():
            sys.stdout.write("\r\x1b[2K")
            sys.stdout.flush()


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    main()
