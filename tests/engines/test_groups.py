"""A model with a recurrent state: its KV is handed over at boundaries, as one engine continues from its own cache there, and a
self-test tells right KV of each KV cache group from wrong. ``test_kv_faults.py`` has a model with windows. The nightly
``test_models.py`` has more families and more of what happens to a request, ``test_self_test.py`` a model whose tokens are
nearly equally likely.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.engines.forged_reads import ENGINE_ARGS, FORGERY_FILE, Forgery, spoil, spoiled
from tests.engines.kv_boundaries import prove_states
from tests.engines.kv_pair import PREFILL, Pair, driver_of, family_model, kv_pair
from tests.engines.self_tests import named, run_self_test
from tests.support.kv_driver import Driver
from tests.support.model_families import FAMILIES

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.slow]

FAMILY = "qwen3-next"
GROUPS = FAMILIES[FAMILY].groups


@pytest.fixture(scope="module")
def forgery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says how the engines spoil what they read."""
    file = tmp_path_factory.mktemp("forgery") / "forgery"
    spoil(file)
    return file


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, forgery: Path) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("groups")
    model = family_model(FAMILY, folder, engine_args=ENGINE_ARGS, environ={FORGERY_FILE: str(forgery)})
    with kv_pair(folder, model) as pair:
        yield pair


@pytest.fixture
async def driver(pair: Pair) -> AsyncIterator[Driver]:
    async with driver_of(pair) as driver:
        yield driver


async def test_a_boundary_of_a_model_with_a_state_is_handed_over(pair: Pair, driver: Driver):
    await prove_states(pair, driver)


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("kind", [Forgery.SWAPPED, Forgery.ZEROED])
async def test_a_self_test_with_wrong_kv_of_one_group_fails(
    pair: Pair, driver: Driver, forgery: Path, kind: Forgery, group: int
):
    """The prefill worker reads: the other one has memory for few self-tests."""
    with spoiled(forgery, kind, group, GROUPS):
        result = await run_self_test(driver.bus, PREFILL, pair.decode)

    assert named(result.failure) == group, result.failure
    assert (await run_self_test(driver.bus, PREFILL, pair.decode)).failure == ""
