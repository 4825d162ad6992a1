"""Logs on stderr: text for people, JSON lines for machines. Facts go into ``extra={"facts": {...}}``.

Each record is one line. Text from clients is escaped: it can neither forge a log line nor control a terminal.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Literal

from opentelemetry import trace

QUIET_LOGGERS = ("httpx", "httpcore", "asyncio", "opentelemetry", "urllib3")
"""Third parties with verbose INFO logs."""
TRACE_ID: ContextVar[str] = ContextVar("trace_id", default="")
"""Trace of the request that this task serves, added to its log records. Empty: not traced."""
DIM, YELLOW, RED, PLAIN = "\x1b[2m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


def setup_logging(service: str, instance: str, *, level: str, log_format: Literal["json", "text"]) -> None:
    """Send all logs of this process to stderr. Call once."""
    handler = logging.StreamHandler(sys.stderr)
    # https://no-color.org: any non-empty value disables colour.
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    text = Text(service, instance, colour=colour)
    handler.setFormatter(JsonLines(service, instance) if log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    """The facts of the record, with its trace id, if any."""
    facts = getattr(record, "facts", None)
    known: Mapping[str, Any] = facts if isinstance(facts, Mapping) else {}
    trace_id = TRACE_ID.get()
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        return {"trace_id": trace.format_trace_id(context.trace_id), **known, "span_id": f"{context.span_id:016x}"}
    return {**known, "trace_id": known.get("trace_id") or trace_id} if trace_id else known


def _utc(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _on_one_line(text: str) -> str:
    """With escapes for line breaks and control characters."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class JsonLines(logging.Formatter):
    """One JSON object per record, in ASCII, so that no character in it can end the line."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._service = service
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "service": self._service,
            "instance": self._instance,
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Text(logging.Formatter):
    """``07:31:02.123 router-1 WARNING message key=value``, in colour on a terminal."""

    def __init__(self, service: str, instance: str, *, colour: bool = False) -> None:
        super().__init__()
        self._process = instance if instance.startswith(service) else f"{service}/{instance}"
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        known = "".join(f" {_on_one_line(name)}={_on_one_line(str(value))}" for name, value in _facts(record).items())
        loud = RED if record.levelno >= logging.ERROR else YELLOW if record.levelno >= logging.WARNING else ""
        head = self._painted(f"{_utc(record)[11:-1]} {self._process}", DIM)
        line = f"{head} {self._painted(level + _on_one_line(record.getMessage()), loud)}{self._painted(known, DIM)}"
        if record.exc_info:
            # Indented, so that no line of it looks like a log record.
            stack = self.formatException(record.exc_info).split("\n")
            line = "\n".join([line, *(f"    {_on_one_line(each)}" for each in stack)])
        return line

    def _painted(self, text: str, paint: str) -> str:
        return f"{paint}{text}{PLAIN}" if self._colour and paint and text else text
