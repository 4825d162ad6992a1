"""Builds what a release consists of: ``python scripts/make_dist.py FOLDER``.

Wheels for each supported Python that is here, cross-compiled ones for Arm, a source distribution, an SBOM of each lock
(CycloneDX), and SHA-256 sums. It fails when a part in C was not compiled, which setuptools only mentions in its log.
With ``--pure`` nothing is compiled: the one wheel is for every machine.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path

from build_backend import NAMESPACE, build_sdist  # This folder is on the path of its scripts.
from pythons import pythons

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".baton" / "dist"
"""Environments of the tools, and of the Pythons that have none here."""
LOCKS = ("services", "engine-cpu", "engine-cuda", "engine-cuda-0.33")
GLIBC_MINOR = 34
"""2.34 is the oldest glibc that the wheels run with: that of RHEL 9."""
CROSS = "aarch64"
C_MODULES = ("_block_table", "_placement", "_tokenize")
NATIVE = (
    *(f"{NAMESPACE}/services/router/native/{name}." for name in C_MODULES), f"{NAMESPACE}/shared/request_path__mypyc."
)  # fmt: skip
COMPLAINT = re.compile(r"error|not found|No such file", re.IGNORECASE)
COMPLAINTS_MAX = 8


class Refused(Exception):
    """Nothing was made; the message says what to do."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pure", action="store_true", help="make one wheel whose router runs in Python only")
    parser.add_argument("--here", action="store_true", help="make one wheel, for this Python and machine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-dist-") as scratch:
        made = Path(scratch, "made")
        made.mkdir()
        try:
            if options.pure or options.here:
                make_wheel(Path(sys.executable), made, {"_BATON_PURE": "1"} if options.pure else {})
            else:
                make_release(made)
        except Refused as why:
            sys.exit(str(why))
        options.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(made.iterdir()):
            print(shutil.move(path, options.folder / path.name))
    if options.pure:
        print("Its routers run the Python form of what others have in C, at several times the CPU.")


def make_release(folder: Path) -> None:
    tools = environment("tools", Path(sys.executable), "dist")
    say("building the source distribution")
    # setuptools names every file, and warns of what its configuration may become.
    with redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        sources = folder / build_sdist(str(folder))
    builds = {python.name: environment(python.name, python, "services") for python in pythons()}

    def build(name: str, machine: str) -> None:
        say(f"building for {name} on {machine}")
        with tempfile.TemporaryDirectory() as scratch, tarfile.open(sources) as packed:
            packed.extractall(scratch, filter="data")
            (project,) = Path(scratch).iterdir()
            wheel = make_wheel(builds[name], Path(scratch), compiler(machine, tools, name), project)
            run([tools.with_name("auditwheel"), "repair", "--plat", "auto", "--wheel-dir", folder, wheel])

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # Half of a build runs on one core.
        begun = [threads.submit(build, *each) for each in product(builds, sorted({platform.machine(), CROSS}))]
        try:
            for one in begun:
                one.result()
        except Refused:
            threads.shutdown(cancel_futures=True)
            raise
    for path in folder.glob("*.whl"):
        if max(map(int, re.findall(r"linux_2_(\d+)_", path.name)), default=GLIBC_MINOR + 1) > GLIBC_MINOR:
            raise Refused(f"{path.name} needs a newer glibc than 2.{GLIBC_MINOR}: make it on an older distribution.")
    say("writing SBOMs and sums")
    for lock in LOCKS:
        listed = ["requirements", ROOT / "requirements" / f"{lock}.txt", "--pyproject", ROOT / "pyproject.toml"]
        target = ["--output-reproducible", "--output-file", folder / f"baton-{lock}.cdx.json"]
        run([tools.with_name("cyclonedx-py"), *listed, *target])
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums))


def make_wheel(python: Path, folder: Path, variables: Mapping[str, str], project: Path = ROOT) -> Path:
    """With the packages that the environment of ``python`` has. Raises Refused, also when a part in C that is wanted
    was not compiled.
    """
    command = [python, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    done = subprocess.run(
        [*command, project],
        env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Refused(f"{done.stdout}\nThe wheel could not be built.")
    (wheel,) = folder.glob("*.whl")
    missing = not_compiled(wheel)
    if missing and "_BATON_PURE" not in variables:
        complaints = [line.strip() for line in done.stdout.splitlines() if COMPLAINT.search(line)]
        raise Refused(refusal(missing, complaints[:COMPLAINTS_MAX]))
    return wheel


def not_compiled(wheel: Path) -> list[str]:
    """Modules in C that the wheel lacks."""
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    return [each for each in NATIVE if not any(name.startswith(each) and name.endswith(".so") for name in names)]


def refusal(missing: list[str], complaints: list[str]) -> str:
    said = "".join(f"    {line}\n" for line in complaints)
    named = ", ".join(module.removesuffix(".").replace("/", ".") for module in missing)
    return (
        f"No wheel was made: {named} could not be compiled. A router without it uses several times the CPU.\n"
        f"{said}"
        "Install a C compiler and Python's headers (apt-get install gcc libc6-dev python3-dev), or make a wheel"
        " without it: make wheel PURE=1"
    )


def environment(name: str, python: Path, lock: str) -> Path:
    """The Python of an environment with the packages of a lock; made unless it is there."""
    folder, text = TOOLS / name, (ROOT / "requirements" / f"{lock}.txt").read_text()
    stamp = folder / "installed"
    if not stamp.exists() or stamp.read_text() != text:
        run([python, "-m", "venv", "--clear", folder])
        run([folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r",
             ROOT / "requirements" / f"{lock}.txt"])  # fmt: skip
        stamp.write_text(text)
    return folder / "bin/python"


def compiler(machine: str, tools: Path, python: str) -> dict[str, str]:
    """Variables with which setuptools compiles for such a processor: with this machine's compiler for its own, else
    with zig's. Header files are this Python's: what extensions include of them is the same for processors of 64 bits.
    """
    if machine == platform.machine():
        # Python's own command may have paths of this machine in what it links.
        return {"LDSHARED": f"{os.environ.get('CC', 'cc')} -shared"}
    zig = f"{tools} -m ziglang cc -target {machine}-linux-gnu.2.{GLIBC_MINOR}"
    suffix = f".cpython-{python.removeprefix('python').replace('.', '')}-{machine}-linux-gnu.so"
    return {
        "CC": zig, "LDSHARED": f"{zig} -shared", "SETUPTOOLS_EXT_SUFFIX": suffix,
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}", "ZIG_GLOBAL_CACHE_DIR": str(TOOLS / "zig"),
    }  # fmt: skip


def run(command: Sequence[str | Path]) -> None:
    """With the programs of the tools, which some of them call. Raises Refused."""
    env = {**os.environ, "PATH": f"{TOOLS / 'tools/bin'}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise Refused(f"{done.stdout}\n{' '.join(map(str, command))} failed.")


def say(text: str) -> None:
    print(f"dist: {text}", flush=True)


if __name__ == "__main__":
    main()
