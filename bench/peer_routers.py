"""Routers of other projects that ``make bench-router PEERS=1`` and ``make bench-serving`` measure: from PyPI, each in a venv of its own below
``.peers/``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".peers"


@dataclass(frozen=True)
class Peer:
    package: str
    version: str
    arguments: tuple[str, ...]
    """Of its launcher, for P/D."""
    bootstrap_port: bool
    """Whether a prefill engine's URL is followed by its bootstrap port."""

    @property
    def name(self) -> str:
        return f"{self.package} {self.version}"

    @property
    def venv(self) -> Path:
        return FOLDER / f"{self.package}-{self.version}"

    def install(self) -> None:
        """Once; raises CalledProcessError."""
        done = self.venv / "installed"
        if done.exists():
            return
        print(f"installing {self.name} from PyPI into {self.venv}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", self.venv], check=True)
        pip = [self.venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"{self.package}=={self.version}"], check=True)
        done.touch()

    def command(self, port: int, metrics_port: int, prefill: list[int], decode: list[int], policy: str) -> list[str]:
        """Start it in front of engines with these ports."""
        command = self._command(port, metrics_port, [*self.arguments, "--policy", policy])
        for number, engine in enumerate(prefill):
            bootstrap = [str(9000 + number)] if self.bootstrap_port else []
            command += ["--prefill", f"http://127.0.0.1:{engine}", *bootstrap]
        for engine in decode:
            command += ["--decode", f"http://127.0.0.1:{engine}"]
        return command

    def whole_command(self, port: int, metrics_port: int, engines: list[int]) -> list[str]:
        """Start it in front of engines that do both, placing by what is cached where."""
        urls = [f"http://127.0.0.1:{engine}" for engine in engines]
        whole = [argument for argument in self.arguments if not argument.endswith("-disaggregation")]
        return self._command(port, metrics_port, [*whole, "--policy", "cache_aware", "--worker-urls", *urls])

    def _command(self, port: int, metrics_port: int, arguments: Sequence[str]) -> list[str]:
        command = [str(self.venv / "bin" / self.package), *arguments, "--host", "127.0.0.1", "--port", str(port)]
        return [*command, "--prometheus-port", str(metrics_port), "--log-level", "error"]


NO_BREAKER = "--disable-circuit-breaker"
"""A breaker opens after ten failures and refuses all requests for a minute, which would end the benchmark."""
PEERS = (
    Peer("sglang-router", "0.3.2", ("launch", "--pd-disaggregation", NO_BREAKER), bootstrap_port=True),
    Peer("vllm-router", "0.1.17", ("--vllm-pd-disaggregation", NO_BREAKER), bootstrap_port=False),
)
