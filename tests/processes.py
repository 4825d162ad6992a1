"""Service processes for tests: started with settings, told to stop or killed, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
STOP_S_MAX = 20.0


class ServiceProcess:
    """One ``python -m services.<name>``. ``log`` is a file with what it said."""

    def __init__(self, name: str, log: Path, settings: dict[str, str]) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"services.{name}"],
                cwd=ROOT,
                env={**os.environ, **settings},
                stdout=out,
                stderr=out,
            )

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S_MAX)

    def kill(self) -> None:
        """SIGKILL; harmless when it is over."""
        self.process.kill()
        self.process.wait(STOP_S_MAX)


@contextmanager
def service_process(name: str, directory: Path, **settings: str) -> Iterator[ServiceProcess]:
    """A service until the block ends; ``settings`` are environment variables. What it said is shown if the block fails."""
    one = ServiceProcess(name, directory / f"{name}-{os.urandom(3).hex()}.log", settings)
    try:
        yield one
    except BaseException:
        print(one.log.read_text()[-4000:])
        raise
    finally:
        one.kill()
