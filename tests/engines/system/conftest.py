from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.system.fleet import THRESHOLD, Fleet, running_fleet
from tests.support.kv_driver import BLOCK


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Tokens are worth fetching from the first block on, so that short prompts say much. All workers have a cache hit
    threshold, which no client may notice.
    """
    few = {"WORKER_KV_FETCH_MIN_TOKENS": str(BLOCK), "ROUTER_FETCH_TOKENS_MIN": str(BLOCK)}
    with running_fleet(tmp_path_factory.mktemp("fleet"), **few, WORKER_CACHE_HIT_THRESHOLD=str(THRESHOLD)) as fleet:
        yield fleet
