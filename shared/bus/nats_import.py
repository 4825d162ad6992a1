"""Imports nats-py without aiohttp, which it would import for WebSockets where it is installed (with vLLM, for example).

Baton's bus uses none, and aiohttp takes a fifth of the time that a service needs to start. Import this before nats.
"""

from __future__ import annotations

import sys

if "aiohttp" not in sys.modules and "nats" not in sys.modules:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]  # An import of it fails, as if it were not installed.
    try:
        import nats.aio.transport  # noqa: F401
    finally:
        del sys.modules["aiohttp"]
