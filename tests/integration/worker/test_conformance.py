"""Somebody else's store passes the conformance checks; one that drops leased blocks fails the check of that.

Other faults, and Baton's own store: ``tests/nightly/test_judged_stores.py``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.judged_stores import failures

pytestmark = [
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed"),
]


def test_a_store_passes(tmp_path: Path):
    assert failures(tmp_path, "other") == {}


def test_a_store_that_drops_leased_blocks_fails(tmp_path: Path):
    failed = failures(tmp_path, "other-drops")

    assert "changed while they were leased" in failed["keep"]
    assert not {"describe", "unknown", "insert", "look up"} & set(failed)
