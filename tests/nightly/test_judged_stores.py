"""Baton's own store passes the conformance checks; stores with a fault fail the check of that fault."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from services.worker.conformance.checks import CHECKS
from tests.support.judged_stores import BLOCKS, failures

pytestmark = [
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed"),
]


@pytest.mark.parametrize("files", [0, 4 * BLOCKS])
def test_batons_own_store_passes(tmp_path: Path, files: int):
    """Whatever engine its settings name."""
    assert failures(tmp_path, "vllm", files=files) == {}


@pytest.mark.parametrize(
    ("engine", "check", "why"),
    [
        ("other-swaps", "bytes", "have other bytes than were inserted"),
        ("other-hides", "drop", "of which its snapshot has"),
    ],
)
def test_a_fault_fails_its_check(tmp_path: Path, engine: str, check: str, why: str):
    failed = failures(tmp_path, engine)

    assert why in failed[check]
    assert not {"describe", "unknown", "insert", "look up"} & set(failed)


def test_a_store_that_never_answers_fails(tmp_path: Path):
    failed = failures(tmp_path, "other-hangs", answer_s=3.0)

    assert "it did not answer" in failed["lease"]
    assert len(failed) >= len(CHECKS) - 2
