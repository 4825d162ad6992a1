"""Settings of the metrics collector, from COLLECTOR_* variables."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the collector listens, and which keys may give orders at its console."""

    # Addresses
    host: str = "127.0.0.1"
    """Address of the console and the metrics. Change it when other machines are to reach them; then keys are needed, or
    ``insecure``.
    """
    port: int = 8001
    """Port of the console and the metrics. Change it when another process has it."""
    published_host: str = ""
    """The address at which clients reach this port, where it is not ``host``. Change it when a container's port is
    published: it decides whether keys are needed.
    """

    # Access
    insecure: bool = False
    """Let other machines read the console and metrics without keys. Change it when the network itself lets only trusted
    readers in.
    """
    allowed_hosts: str = ""
    """Names of a proxy in front of the collector, with commas. Pages of other sites may not use the console, and on
    loopback without keys it answers only to addresses, ``localhost`` and names that no other party can register. Change
    it when a proxy gets 403 for its host name.
    """
    admin_key_file: str = ""
    """Either a file of the routers' API keys, of which those with the permission view or admin count, or SHA-256
    digests of admin keys, one a line. Holders of one of the keys may read, and with the permission admin also act:
    drain workers, change roles, set the default mode. Where only this machine can connect, ``/metrics`` needs no key.
    Empty: every user of this machine may read and act; other addresses need ``insecure``. Change it when other
    machines, or only some users of this one, are to use the console.
    """
