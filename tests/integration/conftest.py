from __future__ import annotations

import asyncio

import pytest

from shared.contracts.channels import Party
from tests.support.nats_server import make_buckets


@pytest.fixture(scope="module")
def guarded(keys, tmp_path_factory):
    """A server that knows the module's ``keys``, with the buckets of an orchestrator."""
    with keys.server(tmp_path_factory.mktemp("nats")) as server:
        asyncio.run(make_buckets(server.url, keys.access(Party.ORCHESTRATOR)))
        yield server
