"""A cluster's keys, as `baton init` makes them, for tests with a real nats-server."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

from services.launcher.cluster.files import create
from services.launcher.cluster.folder import NKEY, TRUSTED, InitRequest, folder_of
from shared.bus.nats_credentials import Access, read_seed
from tests.support.nats_server import NatsServer


class ClusterKeys:
    """A folder of keys; ``secured`` is the configuration of a server that knows them."""

    def __init__(self, folder: Path, *workers: str) -> None:
        self.folder = folder
        self.made = create(folder, InitRequest(workers=workers, api_key=False), datetime.now(UTC))

    def access(self, owner: str) -> Access:
        own = self.folder / folder_of(owner)
        return Access(nkey_file=str(own / NKEY), ca_file=str(own / TRUSTED))

    def raw_options(self, owner: str) -> dict[str, object]:
        """For nats-py itself: the same key, and none of our code between."""
        access = self.access(owner)
        return {
            "nkeys_seed_str": read_seed(access.nkey_file).text,
            "tls": ssl.create_default_context(cafile=access.ca_file),
        }

    def server(self, folder: Path) -> NatsServer:
        """Not started yet."""
        (folder / "secure.conf").write_text((self.folder / "nats" / "secure.conf").read_text())
        server = NatsServer(folder, extra_config='include "secure.conf"')
        server.url = server.url.replace("nats://", "tls://")
        return server
