"""Builds the wheel: ``python scripts/make_wheel.py FOLDER [--pure]``. Without ``--pure`` it fails when a part in C was
not compiled, which setuptools only mentions in its log.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
C_MODULES = ("_block_table", "_placement", "_tokenize")
NATIVE = (*(f"services/router/native/{name}." for name in C_MODULES), "shared/request_path__mypyc.")
COMPLAINT = re.compile(r"error|not found|No such file", re.IGNORECASE)
COMPLAINTS_MAX = 8


def main() -> None:
    """Build into a temporary folder, so that FOLDER gets only a wheel that was accepted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pure", action="store_true", help="accept a wheel whose router runs in Python only")
    options = parser.parse_args()
    # Modules that an earlier build compiled would be packed into this wheel.
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
        built = subprocess.run(
            [*command, "--wheel-dir", scratch, str(ROOT)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if built.returncode:
            sys.exit(f"{built.stdout}\nThe wheel could not be built.")
        (wheel,) = Path(scratch).glob("*.whl")
        missing = not_compiled(wheel)
        if missing and not options.pure:
            complaints = [line.strip() for line in built.stdout.splitlines() if COMPLAINT.search(line)]
            sys.exit(refusal(missing, complaints[:COMPLAINTS_MAX]))
        options.folder.mkdir(parents=True, exist_ok=True)
        print(shutil.move(wheel, options.folder / wheel.name))
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
        "Install a C compiler and Python's headers (apt-get install gcc libc6-dev python3.11-dev), or accept a wheel"
        " without it: make dist PURE=1"
    )


if __name__ == "__main__":
    main()
