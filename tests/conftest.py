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


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With two processes, one has all real engines, which are many cores' work already; the others' files are shared
    out, those that wait most first.
    """
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        one_fleet = item.path.parent.name == "chaos"  # of all its files
        group = "engines" if item.get_closest_marker("vllm") else "chaos" if one_fleet else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("vllm"):
        return 0
    return 1 if "e2e" in item.path.parts else 2


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server
