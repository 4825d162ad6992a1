"""Windows and recurrent states on GPUs: vLLM's model runner there copies a state before a request writes on, and runs behind the
scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shared.contracts.kv_exchange import KvGroupKind
from tests.engines.kv_boundaries import (
    left_out,
    lengths,
    of_another_position,
    prove_controls,
    prove_handoffs,
    prove_too_short,
)
from tests.gpu.conftest import Pair, driver_of, running
from tests.gpu.places import ON_CPU, Place, place
from tests.support.model_families import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.nats]

WINDOWS = ("mistral-window", "gemma-3", "gemma-4", "gpt-oss")
STATES = ("qwen3-next", "granite-4", "nemotron-h", "falcon-h1", "lfm2")
ENGINE_ARGS = "--enforce-eager --gpu-memory-utilization 0.3"
"""With the kernels and the type that vLLM chooses for the model."""


def place_for(model: Path, rank: int) -> Place:
    """VLLM chooses the length of blocks, which follows the size of a state."""
    where = place(rank)
    settings = {**where.settings, "model": str(model)}
    if not ON_CPU:
        settings |= {"engine_args": ENGINE_ARGS}
        del settings["block_size"]
    return replace(where, settings=settings)


@pytest.fixture(scope="module", params=[*WINDOWS, *STATES])
def families(
    request: pytest.FixtureRequest, one_gpu: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Pair]]:
    folder = tmp_path_factory.mktemp("groups")
    model = make_model(request.param, folder)
    with running(folder, place_for(model, 0), place_for(model, 1)) as pair:
        yield request.param, pair


async def test_a_family_continues_from_a_boundary_as_from_its_own_cache(families: tuple[str, Pair]):
    """Proves: with tails of 1, 2, one less than a unit and no tokens, offered and followed, the decode engine answers as
    an engine that found the same boundary in its own cache. A state that is leased while a request writes it, or copied
    after the grant, gives other tokens; so do the two wrong blocks of the controls.
    """
    family, pair = families
    hashing = (await pair.records())["p1"].hashing
    kind, forges = (
        (KvGroupKind.STATE, [left_out, of_another_position]) if family in STATES else (KvGroupKind.WINDOW, [left_out])
    )
    async with asyncio.timeout(600), driver_of(pair) as driver:
        await prove_handoffs(driver, hashing, [*lengths(hashing, 300), *lengths(hashing, 1500)])
        await prove_too_short(driver, hashing)
        await prove_controls(driver, hashing, kind, forges)
