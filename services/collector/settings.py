"""What the metrics collector can be told, from COLLECTOR_* variables."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it listens and how often it pushes."""

    host: str = "127.0.0.1"
    port: int = 8001
    instance: str = ""
    """A name unique among metrics collectors, one subject token; made up when empty."""
    admin_key_file: str = ""
    """Who has one of its keys may act at the console: drain workers, change roles. Either a file of API keys such as
    routers have, of which those with the permission admin count, or SHA-256 digests of keys, one a line. Empty: on
    loopback everybody may act, elsewhere nobody.
    """
    console_clients_max: int = 32
    """Browsers that look at the console at a time."""
    push_s: float = 5.0
    """Between two pushes of OTLP metrics, when BATON_OTLP_ENDPOINT is set."""
