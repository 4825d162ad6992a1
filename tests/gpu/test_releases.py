"""Engines of two releases of vLLM beside each other: each computes for itself.

``OTHER_PYTHON`` is the Python of an environment with the other release, which `BATON_ENGINE=cuda-0.33 make setup` makes
in another clone. On the CPU the other release's Python files are laid over the CPU build.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.conftest import DECODE, PREFILL, Pair, driver_of, running
from tests.gpu.places import ON_CPU, Place, place
from tests.support.kv_driver import Driver, transfer_report_of
from tests.support.prompts import random_prompt
from tests.support.vllm_releases import RELEASES, laid_over
from tests.unit.connector.vllm_interfaces import installed_release

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.nats]

OTHER_PYTHON = os.environ.get("OTHER_PYTHON", "")


def with_other_release(where: Place, folder: Path) -> Place:
    if ON_CPU:
        (other,) = RELEASES.keys() - {installed_release()}
        return replace(where, environ={**where.environ, "PYTHONPATH": str(laid_over(RELEASES[other], folder))})
    if not OTHER_PYTHON:
        pytest.skip("OTHER_PYTHON is not set: the Python of an environment with another release of vLLM")
    return replace(where, python=OTHER_PYTHON)


@pytest.fixture(scope="module")
def releases(one_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("releases")
    with running(folder, place(0), with_other_release(place(1), folder)) as pair:
        yield pair


@pytest.fixture
async def driver(releases: Pair) -> AsyncIterator[Driver]:
    async with driver_of(releases) as driver:
        yield driver


async def test_releases_have_fingerprints_of_their_own(releases: Pair):
    """Proves: no router pairs such workers, and neither asks the other for KV."""
    of = {name: record.fingerprint for name, record in (await releases.records()).items()}

    assert (of[PREFILL].revision, of[PREFILL].dtype) == (of[DECODE].revision, of[DECODE].dtype)
    assert of[PREFILL].engine_version != of[DECODE].engine_version
    assert of[PREFILL].key() != of[DECODE].key()


@pytest.mark.parametrize("order", [(PREFILL, DECODE), (DECODE, PREFILL)], ids=["to the other", "from the other"])
async def test_kv_of_another_release_is_not_read(driver: Driver, order: tuple[str, str]):
    """Proves: an engine that is ordered to read from one of another release computes by itself, and gives its own
    tokens.
    """
    holder, reader = order
    prompt = random_prompt(f"releases {holder}", 1000)
    alone = await driver.alone(reader, prompt)

    taken = await driver.taken(reader, prompt, await driver.offered(holder, prompt))

    assert taken.failure is None
    assert transfer_report_of(taken).fetched_tokens == 0
    assert taken.token_ids[1:] == alone[1:]
