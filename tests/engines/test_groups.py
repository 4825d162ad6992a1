"""A model with a recurrent state: its KV is handed over at boundaries, as one engine continues from its own cache there.
``test_kv_faults.py`` has a model with windows, the nightly ``test_models.py`` more families and more of what happens to a
request.
"""

from __future__ import annotations

import pytest

from tests.engines.kv_boundaries import prove_states
from tests.engines.kv_pair import family_model

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.slow]


def test_a_boundary_of_a_model_with_a_state_is_handed_over(tmp_path):
    prove_states(tmp_path, family_model("qwen3-next", tmp_path))
