"""The fault tests of the KV exchange with a model whose layers are all alike, one with states, and an MLA model; and with
a prefill engine of two pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.kv_pair import STAGES, Pair, family_model, kv_pair
from tests.engines.test_kv_faults import *  # noqa: F403  # All tests, marks and fixtures; ``pair`` is replaced.


@pytest.fixture(scope="module", params=["llama", "granite-4", "deepseek-v2", STAGES])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("kv-faults")
    with kv_pair(folder, family_model(request.param, folder)) as pair:
        yield pair
