"""A model with windows and one with a recurrent state: their KV is handed over at boundaries, as one engine continues from its
own cache there. The nightly ``test_models.py`` has more families and more of what happens to a request.
"""

from __future__ import annotations

import asyncio

import pytest

from shared.contracts.kv_exchange import KvGroupKind
from tests.engines.kv_boundaries import (
    Forge,
    left_out,
    lengths,
    of_another_position,
    prove_controls,
    prove_handoffs,
    prove_sizes,
    prove_too_short,
)
from tests.engines.kv_pair import Model, driver_of, kv_pair
from tests.support.kv_driver import MODEL
from tests.support.model_families import FAMILIES, make_model

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.slow]


@pytest.mark.parametrize(
    ("family", "kind", "forges"),
    [("gpt-oss", KvGroupKind.WINDOW, [left_out]), ("qwen3-next", KvGroupKind.STATE, [left_out, of_another_position])],
)
def test_a_boundary_is_handed_over(tmp_path, family: str, kind: KvGroupKind, forges: list[Forge]):
    settings = {"model": str(make_model(family, tmp_path)), "served_model_name": MODEL}
    with kv_pair(tmp_path, Model(settings, FAMILIES[family])) as pair:

        async def prove() -> None:
            assert pair.prefill.record is not None
            hashing = pair.prefill.record.hashing
            async with driver_of(pair) as driver:
                await prove_sizes(driver, pair.prefill.record)
                await prove_handoffs(driver, hashing, lengths(hashing, 300))
                await prove_too_short(driver, hashing)
                await prove_controls(driver, hashing, kind, forges)

        asyncio.run(prove())
