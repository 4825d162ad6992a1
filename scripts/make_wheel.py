"""Builds the wheel: ``python scripts/make_wheel.py FOLDER [--pure]``. Without ``--pure`` it fails when a part in C was
not compiled, which setuptools only mentions in its log. With it, nothing is compiled: the wheel is for every machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from build_lock import Busy, alone  # This folder is on the path of its scripts.

ROOT = Path(__file__).resolve().parents[1]
C_MODULES = ("_block_table", "_placement", "_tokenize")
NATIVE = (*(f"services/router/native/{name}." for name in C_MODULES), "shared/request_path__mypyc.")
COMPLAINT = re.compile(r"error|not found|No such file", re.IGNORECASE)
COMPLAINTS_MAX = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pure", action="store_true", help="make a wheel whose router runs in Python only")
    options = parser.parse_args()
    try:
        with alone():
            make(options.folder, pure=options.pure)
    except Busy as busy:
        sys.exit(f"No wheel was made: {busy}")


def make(folder: Path, *, pure: bool) -> None:
    """Build into a temporary folder, so that ``folder`` gets only a wheel that was accepted."""
    environment = {**os.environ, "_BATON_PURE": "1"} if pure else dict(os.environ)
    # Modules that an earlier build compiled would be packed into this wheel.
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
        built = subprocess.run(
            [*command, "--wheel-dir", scratch, str(ROOT)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if built.returncode:
            sys.exit(f"{built.stdout}\nThe wheel could not be built.")
        (wheel,) = Path(scratch).glob("*.whl")
        missing = not_compiled(wheel)
        if missing and not pure:
            complaints = [line.strip() for line in built.stdout.splitlines() if COMPLAINT.search(line)]
            sys.exit(refusal(missing, complaints[:COMPLAINTS_MAX]))
        folder.mkdir(parents=True, exist_ok=True)
        print(shutil.move(wheel, folder / wheel.name))
        if missing:
            print(f"It is without {named(missing)}: routers run their Python form, at several times the CPU.")


def not_compiled(wheel: Path) -> list[str]:
    """Modules in C that the wheel lacks."""
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    return [each for each in NATIVE if not any(name.startswith(each) and name.endswith(".so") for name in names)]


def named(modules: list[str]) -> str:
    return ", ".join(module.removesuffix(".").replace("/", ".") for module in modules)


def refusal(missing: list[str], complaints: list[str]) -> str:
    said = "".join(f"    {line}\n" for line in complaints)
    return (
        f"No wheel was made: {named(missing)} could not be compiled. A router without it uses several times the CPU.\n"
        f"{said}"
        "Install a C compiler and Python's headers (apt-get install gcc libc6-dev python3-dev), or make a wheel"
        " without it: make dist PURE=1"
    )


if __name__ == "__main__":
    main()
