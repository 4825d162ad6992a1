"""Settings of the metrics collector, from COLLECTOR_* variables."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the collector listens, and which keys may give orders at its console."""

    host: str = "127.0.0.1"
    port: int = 8001
    instance: str = ""
    """A name unique among metrics collectors, one subject token; generated when empty."""
    allowed_hosts: str = ""
    """Pages of other sites may not use the console, and on loopback without keys it answers only to addresses,
    ``localhost`` and names that nobody else can register. Names of a proxy in front of it, with commas.
    """
    admin_key_file: str = ""
    """Holders of one of its keys may act at the console: drain workers, change roles, set the default mode. Either a
    file of the routers' API keys, of which those with the permission admin count, or SHA-256 digests of keys, one a
    line. Empty: on loopback every user may act, on other addresses none.
    """
