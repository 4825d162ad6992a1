"""Workers on two hosts, with a bus that is as far away as a test wishes.

Two network namespaces with a cable between them. A relay in front of nats-server delays what workers send and receive;
whoever enters the ``with`` block stands beside the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.delaying_relay import delaying_relay
from tests.support.nats_server import NatsServer
from tests.support.network_hosts import ADDRESSES, two_hosts, typing_on
from tests.support.worker_processes import WorkerProcess, start_worker, wait_ready

OVER_TCP = {"UCX_TLS": "tcp,self"}
"""Both namespaces are one machine, whose shared memory UCX would use."""
OWN_FILES = 'mkdir -p "$TMPDIR" && mount -t tmpfs tmpfs "$TMPDIR" && exec "$@"'
"""Another host does not see this one's sockets. ``ip netns exec`` has made a namespace of mounts."""


@contextmanager
def distant_workers(
    folder: Path, workers: Mapping[str, Mapping[str, str]], on_second: Container[str], delay_s: float
) -> Iterator[tuple[NatsServer, dict[str, WorkerProcess]]]:
    """Ready workers with these WORKER_* settings, those in ``on_second`` on the second host. Each host has a core.
    ``delay_s`` is added to each way between a worker and the server, so twice to a message between two workers.
    """
    running: dict[str, WorkerProcess] = {}
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(folder, OVER_TCP))
        stack.enter_context(typing_on(hosts[0]))
        nats = stack.enter_context(NatsServer(folder, host=ADDRESSES[0], has_buckets=True))
        relay = stack.enter_context(delaying_relay(ADDRESSES[0], (nats.host, nats.port)))
        relay.set_delay(delay_s)
        stack.callback(lambda: [worker.kill() for worker in running.values()])
        for name, settings in workers.items():
            number = int(name in on_second)
            through = [*hosts[number].arguments(""), "sh", "-c", OWN_FILES, "sh"]
            environ = {**OVER_TCP, "TMPDIR": str(hosts[number].folder / "tmp")}
            own = {"cpu_cores": str(number), **settings}
            url = "nats://{}:{}".format(*relay.address)
            running[name] = start_worker(url, name, folder, environ=environ, through=through, **own)
        asyncio.run(wait_ready(nats.url, list(running.values())))
        yield nats, running
