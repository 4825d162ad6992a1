"""KV moves between GPUs on the fast path, and a slow one is noticed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest

from services.launcher.doctor.findings import Level
from services.launcher.doctor.workers import SLOW_BYTES_PER_S, about_kv_reads
from shared.contracts.workers import KvMemory
from tests.gpu.conftest import DECODE, PREFILL, Pair, running
from tests.gpu.places import ON_CPU, place

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.nats]

MEMORY = KvMemory.CPU if ON_CPU else KvMemory.CUDA
GET = re.compile(r"remote memory read by ucp_get\S* into cuda")
"""Begins the table of UCX_PROTO_INFO for reads into GPU memory."""
TABLE_LINES = 8

only_on_gpus = pytest.mark.skipif(ON_CPU, reason="a rehearsal on the CPU has no GPU memory")


@pytest.fixture(scope="module")
def tcp_pair(one_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines without the fast transports. NIXL needs cuda_copy to copy between GPU and host memory."""
    transports = "tcp,self" if ON_CPU else "tcp,cuda_copy,self"
    with running(tmp_path_factory.mktemp("tcp"), place(0), place(1), UCX_TLS=transports) as pair:
        yield pair


async def test_reads_from_gpu_to_gpu_are_faster_than_tcp(pair: Pair):
    """Proves: the self-test measures memory of two GPUs, and what it measures is beyond TCP. Below the limit
    `baton doctor` and the alert KvReadsSlow say what to do: docs/operating.md, "Moving KV between GPUs".
    """
    records = await pair.records()

    for reader, source in ((PREFILL, DECODE), (DECODE, PREFILL)):
        (read,) = records[reader].kv_reads
        assert (read.source_id, read.memory) == (source, MEMORY)
        assert read.bytes_per_s > SLOW_BYTES_PER_S[MEMORY]
    assert [finding.level for finding in about_kv_reads(list(records.values()))] == [Level.OK]


@only_on_gpus
def test_ucx_reads_through_cuda_ipc(pair: Pair):
    """Proves: UCX_CUDA_IPC_ENABLE_GET_ZCOPY works, so that reads use cuda_ipc, with NVLink or without."""
    lines = pair.decode.log.read_text(errors="replace").splitlines()
    tables = ["\n".join(lines[at : at + TABLE_LINES]) for at, line in enumerate(lines) if GET.search(line)]

    assert tables, "UCX_PROTO_INFO logs no read into GPU memory"
    assert "cuda_ipc" in tables[-1], tables[-1]


@only_on_gpus
def test_a_pair_over_tcp_is_called_slow(tcp_pair: Pair):
    """Proves: the limit lies above what TCP with copies through host memory can do, so that the warning comes."""
    findings = list(about_kv_reads(list(asyncio.run(tcp_pair.records()).values())))

    assert [finding.level for finding in findings] == [Level.WARNING, Level.WARNING]
