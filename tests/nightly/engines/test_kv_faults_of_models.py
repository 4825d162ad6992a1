"""The fault tests of the KV exchange with a model of which most layers have a window, and with an MLA model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.kv_pair import Model, Pair, kv_pair
from tests.engines.test_kv_faults import *  # noqa: F403  # All tests, marks and fixtures; ``pair`` is replaced.
from tests.support.kv_driver import MODEL
from tests.support.model_families import FAMILIES, make_model


@pytest.fixture(scope="module", params=["gemma-3", "deepseek-v2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    family, folder = request.param, tmp_path_factory.mktemp("kv-faults")
    settings = {"model": str(make_model(family, folder)), "served_model_name": MODEL}
    with kv_pair(folder, Model(settings, FAMILIES[family])) as pair:
        yield pair
