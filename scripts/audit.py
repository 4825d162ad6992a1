"""``make audit``: looks every locked package up among the known vulnerabilities, with pip-audit.

That needs the network and is no part of ``make test``. 0: nothing is known against any of them. 1: something is. 3: the
data could not be had, for some of them or for all, so nothing is known about those.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOOL = ROOT / ".baton" / "audit"
"""An environment of its own: what audits is no part of what is audited."""
PIP_AUDIT = "pip-audit==2.10.1"
SERVICES = ("pypi", "osv")
"""Vulnerability services, asked in this order until one has data."""
INSTALL_S_MAX = 300
ASK_S_MAX = 600
NOTHING_KNOWN, VULNERABLE, NO_DATA = 0, 1, 3
SHOWN_MAX = 8
TROUBLE_CHARS_MAX = 120


@dataclass
class Findings:
    """Of one file."""

    audited: int = 0
    vulnerable: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Packages without data in any service."""
    trouble: str = ""
    """Why there is no answer at all."""


def read(report: str, said: str) -> Findings:
    """What pip-audit's JSON says, or its last words where there is none."""
    try:
        packages: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        lines = said.strip().splitlines()
        return Findings(trouble=lines[-1][:TROUBLE_CHARS_MAX] if lines else "pip-audit says nothing")
    found = Findings()
    for package in packages:
        if "skip_reason" in package:
            found.unknown.append(package["name"])
            continue
        found.audited += 1
        for known in package.get("vulns", []):
            mended = ", ".join(known.get("fix_versions", [])) or "no version yet"
            found.vulnerable.append(f"{package['name']} {package['version']}: {known['id']}, mended in {mended}")
    return found


def audit(tool: Path, requirements: Path) -> Findings:
    """Ask one service after the other."""
    found = Findings(trouble="no service was asked")
    for service in SERVICES:
        command = [str(tool), "--disable-pip", "--no-deps", "--format", "json", "--progress-spinner", "off"]
        command += ["--vulnerability-service", service, "--requirement", str(requirements)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S_MAX, check=False)
        except subprocess.TimeoutExpired:
            found = Findings(trouble=f"{service} did not answer within {ASK_S_MAX} s")
            continue
        found = read(done.stdout, done.stderr)
        if found.audited:
            break
    return found


def as_text(name: str, found: Findings) -> list[str]:
    """For a person."""
    if found.trouble:
        return [f"{name}: the data on vulnerabilities could not be had: {found.trouble}"]
    lines = [f"{name}: {found.audited} packages audited, {len(found.vulnerable)} vulnerabilities"]
    lines += [f"  {one}" for one in found.vulnerable]
    if found.unknown:
        some = ", ".join(found.unknown[:SHOWN_MAX]) + (", ..." if len(found.unknown) > SHOWN_MAX else "")
        lines.append(f"  no data on {len(found.unknown)} packages, of which nothing is known: {some}")
    return lines


def exit_code(all_found: list[Findings]) -> int:
    if any(found.vulnerable for found in all_found):
        return VULNERABLE
    return NO_DATA if any(found.trouble or found.unknown for found in all_found) else NOTHING_KNOWN


def install() -> Path:
    """pip-audit, in an environment of its own. Raises CalledProcessError, TimeoutExpired."""
    tool = TOOL / "bin" / "pip-audit"
    if not tool.exists():
        venv.create(TOOL, with_pip=True)
        command = [str(TOOL / "bin" / "pip"), "install", "--quiet", PIP_AUDIT]
        subprocess.run(command, check=True, timeout=INSTALL_S_MAX)
    return tool


def main() -> int:
    """Audit all locked files."""
    try:
        tool = install()
    except (subprocess.SubprocessError, OSError) as error:
        print(f"{PIP_AUDIT} could not be installed: {error}", file=sys.stderr)
        return NO_DATA
    all_found = []
    files = sorted((ROOT / "requirements").glob("*.txt"))
    for requirements in (each for each in files if "--hash=" in each.read_text(encoding="utf-8")):
        all_found.append(audit(tool, requirements))
        print("\n".join(as_text(requirements.name, all_found[-1])), flush=True)
    code = exit_code(all_found)
    if code == NO_DATA:
        print("Not audited in full: run this again where the advisories can be reached.", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
