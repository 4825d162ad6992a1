"""NATS as a fleet has it: one server, or a cluster of several, each of which can be killed by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

from tests.support.nats_server import NatsServer, free_port

LOOPBACK = "127.0.0.1"


class NatsCluster:
    """``with NatsCluster(path, nodes=3) as nats``: what is done to it is done to all of its servers."""

    def __init__(self, directory: Path, *, nodes: int = 1, host: str = LOOPBACK) -> None:
        ports = [free_port() for _ in range(nodes)]
        routes = ", ".join(f'"nats://{LOOPBACK}:{port}"' for port in ports)
        self.nodes: dict[str, NatsServer] = {}
        for number, port in enumerate(ports, start=1):
            name = f"nats-{number}"
            folder = directory / name
            folder.mkdir()
            # Processes know the addresses of their lines only.
            of_cluster = (
                f"server_name: {name}\n"
                f'cluster {{ name: chaos, listen: "{LOOPBACK}:{port}", routes: [{routes}], no_advertise: true }}'
            )
            self.nodes[name] = NatsServer(folder, host=host, extra_config=of_cluster if nodes > 1 else "")

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes.values())

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Of all servers, dead ones too."""
        return [(node.host, node.port) for node in self.nodes.values()]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_failure: object) -> None:
        self.kill()

    def start(self) -> None:
        self._each(NatsServer.start)

    def kill(self) -> None:
        self._each(NatsServer.kill)

    def pause(self) -> None:
        self._each(NatsServer.pause)

    def resume(self) -> None:
        self._each(NatsServer.resume)

    def lose_storage(self) -> None:
        self._each(NatsServer.lose_storage)

    def _each(self, do: Callable[[NatsServer], None]) -> None:
        for node in self.nodes.values():
            do(node)
