"""What many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.nats_server import NatsServer

# How long an example takes says how busy the machine is, and nothing about what is promised.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server
