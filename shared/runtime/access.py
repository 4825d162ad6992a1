"""What a process shows NATS, from the settings."""

from __future__ import annotations

from shared.bus.nats_credentials import Access
from shared.runtime.settings import CommonSettings


def access_of(common: CommonSettings, party: str) -> Access:
    """Of a process of that party, if its key does not say itself whose it is."""
    return Access(party=party, nkey_file=common.nats_nkey_file, ca_file=common.nats_ca_file)
