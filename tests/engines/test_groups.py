"""A model with a recurrent state: its KV is handed over at boundaries, as one engine continues from its own cache there.
``test_kv_faults.py`` has a model with windows, the nightly ``test_models.py`` more families and more of what happens to a
request.
"""

from __future__ import annotations

import asyncio

import pytest

from shared.contracts.kv_exchange import KvGroupKind
from tests.engines.kv_boundaries import left_out, of_another_position, prove_boundaries
from tests.engines.kv_pair import driver_of, family_model, kv_pair

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.slow]


def test_a_boundary_of_a_model_with_a_state_is_handed_over(tmp_path):
    with kv_pair(tmp_path, family_model("qwen3-next", tmp_path)) as pair:

        async def prove() -> None:
            assert pair.prefill.record is not None
            async with driver_of(pair) as driver:
                forges = [left_out, of_another_position]
                await prove_boundaries(driver, pair.prefill.record, KvGroupKind.STATE, forges)

        asyncio.run(prove())
