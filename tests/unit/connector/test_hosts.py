"""The ranks of an engine run on its scheduler's host: a lease's end is an instant on that host's clock."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.kv_engines import RankMemory, Shape

pytest.importorskip("vllm.distributed")
from connector.worker.connector_worker import RankHandshake, host_id, refuse_other_hosts


def rank(host: str) -> RankHandshake:
    return RankHandshake(msgspec.msgpack.encode(RankMemory(Shape(), 0).described()), host)


def test_ranks_of_one_host_are_accepted():
    refuse_other_hosts([rank(host_id()), rank(host_id())])


def test_a_rank_on_another_host_is_refused_by_name():
    with pytest.raises(ValueError, match="tensor parallelism over several hosts"):
        refuse_other_hosts([rank(host_id()), rank("another boot")])
