"""The services of one host, for files that start them: their order, their variables, and how long each may stop."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.launcher.system.process_plan import ProcessPlan, Stage, stop_s


class CannotWriteService(Exception):
    """A value cannot be written into a file of services; the message says which."""


@dataclass(frozen=True, kw_only=True)
class File:
    """A file to write."""

    name: str
    text: str
    is_secret: bool = False
    """For its owner only: it may have variables such as HF_TOKEN."""


@dataclass(frozen=True, kw_only=True)
class HostServices:
    """The processes of one host, and where their files are."""

    processes: Sequence[ProcessPlan]
    inherited: Mapping[str, str]
    """Variables of all processes but NATS; those of a process's plan take precedence."""
    folder: str
    """Of the variables' files; absolute."""
    user: str = ""
    """Runs the processes; empty: services of a user's own service manager."""

    @property
    def workers(self) -> list[ProcessPlan]:
        """Those that run engines or store KV."""
        return [each for each in self.processes if each.stage is Stage.WORKERS]

    def before(self, process: ProcessPlan) -> list[ProcessPlan]:
        """Processes that start before this one and stop after it."""
        return [each for each in self.processes if _rank(each) < _rank(process)]

    def variables(self, process: ProcessPlan) -> dict[str, str]:
        inherited = {} if process.stage is Stage.NATS else self.inherited
        return {**inherited, **process.env}

    def stop_s(self, processes: Sequence[ProcessPlan]) -> float:
        """From SIGTERM to SIGKILL, for the slowest of these."""
        return max(stop_s(each, self.inherited) for each in processes)


def _rank(process: ProcessPlan) -> tuple[int, bool]:
    """Start order: of the services, those that requests do without come first."""
    return process.stage, process.serves_requests


def variable_file(name: str) -> str:
    return f"{name}.env"


def read_variables(text: str) -> dict[str, str]:
    """Variables of a file with or without quotes."""
    lines = [line.partition("=") for line in text.splitlines() if line]
    return {name: _unquoted(value) for name, _, value in lines}


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value


def one_line(name: str, text: str) -> str:
    """The text, which a line of a file can hold. Raises CannotWriteService."""
    if any(each in text for each in "\n\r\0"):
        raise CannotWriteService(f"{name} has more than one line")
    return text
