"""The ranks of an engine run on its scheduler's host: a lease's end is an instant on that host's clock."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import msgspec
import pytest

from tests.support.kv_engines import RankMemory, Shape


@pytest.fixture
def worker_role() -> ModuleType:
    """Imports vLLM, which takes ten seconds: not while tests are collected, which each of xdist's processes does."""
    pytest.importorskip("vllm.distributed")
    from connector.worker import connector_worker

    return connector_worker


def rank(worker_role: ModuleType, host: str) -> Any:
    return worker_role.RankHandshake(msgspec.msgpack.encode(RankMemory(Shape(), 0).described()), host)


def test_ranks_of_one_host_are_accepted(worker_role):
    here = worker_role.host_id()

    worker_role.refuse_other_hosts([rank(worker_role, here), rank(worker_role, here)])


def test_a_rank_on_another_host_is_refused_by_name(worker_role):
    ranks = [rank(worker_role, worker_role.host_id()), rank(worker_role, "another boot")]

    with pytest.raises(ValueError, match="does not support ranks on several hosts"):
        worker_role.refuse_other_hosts(ranks)
