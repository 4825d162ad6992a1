"""Settings of the metrics collector, from COLLECTOR_* variables."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the collector listens, and which keys may give orders at its console."""

    host: str = "127.0.0.1"
    port: int = 8001
    published_host: str = ""
    """The address at which clients reach this port, where it is not ``host``: for a container's published port."""
    insecure: bool = False
    """Let other machines read the console and metrics without keys."""
    allowed_hosts: str = ""
    """Pages of other sites may not use the console, and on loopback without keys it answers only to addresses,
    ``localhost`` and names that no other party can register. Names of a proxy in front of it, with commas.
    """
    admin_key_file: str = ""
    """Holders of one of its keys may read, and with the permission admin also act: drain workers, change roles, set the
    default mode. Either a file of the routers' API keys, of which those with the permission view or admin count, or
    SHA-256 digests of admin keys, one a line. Where only this machine can connect, ``/metrics`` needs no key. Empty:
    every user of this machine may read and act; other addresses need ``insecure``.
    """
