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
    """A file with the SHA-256 digests of admin keys, one a line: who has such a key may drain workers and change roles
    at the console. Empty: on loopback everybody may, elsewhere nobody.
    """
    console_clients_max: int = 32
    """Browsers that look at the console at a time."""
    push_s: float = 5.0
    """Between two pushes of OTLP metrics, when BATON_OTLP_ENDPOINT is set."""
