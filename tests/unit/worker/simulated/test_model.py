"""The model that a simulated engine pretends to serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.engines.simulated.model import NoTokenizer, find_model
from services.worker.settings import Settings


def test_a_model_without_a_tokenizer_is_named_with_the_one_that_needs_no_network(tmp_path: Path):
    nowhere = "no/such/model"  # Hugging Face has no names with two slashes, so nothing is asked.

    with pytest.raises(NoTokenizer, match=f"tokenizer of {nowhere}: .* baton-tiny needs no network") as raised:
        find_model(Settings(worker_id="both-1", model=nowhere), tmp_path)

    assert "\n" not in str(raised.value)
