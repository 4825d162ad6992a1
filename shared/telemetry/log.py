"""Logs on stderr: text for people, JSON lines for machines. Facts go into ``extra={"facts": {...}}``."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

from opentelemetry import trace

QUIET_LOGGERS = ("httpx", "httpcore", "asyncio", "opentelemetry", "urllib3")
"""Third parties that say at INFO what nobody asked."""


def setup_logging(service: str, instance: str, *, level: str, log_format: Literal["json", "text"]) -> None:
    """Send all logs of this process to stderr. Call once."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service, instance) if log_format == "json" else Text(service, instance))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    facts = getattr(record, "facts", None)
    return facts if isinstance(facts, Mapping) else {}


def _utc(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _on_one_line(text: str) -> str:
    """What a client made up may not look like a line of ours."""
    return text if text.isprintable() else ascii(text)


class JsonLines(logging.Formatter):
    """One JSON object per record, with the trace it belongs to."""

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
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line["trace_id"] = trace.format_trace_id(context.trace_id)
            line["span_id"] = trace.format_span_id(context.span_id)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class Text(logging.Formatter):
    """``07:31:02.123 router-1 WARNING message key=value``."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._who = instance if instance.startswith(service) else f"{service}/{instance}"

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        facts = "".join(f" {name}={_on_one_line(str(value))}" for name, value in _facts(record).items())
        line = f"{_utc(record)[11:-1]} {self._who} {level}{record.getMessage()}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
