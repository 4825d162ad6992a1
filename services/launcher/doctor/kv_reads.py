"""Findings about the speed of KV reads, as workers measured it in their KV self-tests."""

from __future__ import annotations

from collections.abc import Iterator

from services.launcher.doctor.findings import Area, Finding, Level, named
from shared.contracts.workers import KvMemory, KvReadSpeed, WorkerRecord
from shared.text.quantities import bytes_per_second

SLOW_BYTES_PER_S = {KvMemory.CUDA: 5_000_000_000, KvMemory.CPU: 200_000_000}
"""Below this a read is slow for its memory; the alert KvReadsSlow has the same limits. GPU memory moves at more than
10 GB/s over NVLink, PCIe and RDMA of 100 Gb/s, and at 0.5 to 3 GB/s over TCP. For host memory it is a network of 1 Gb/s
(0.12 GB/s) that is called slow.
"""
CUDA_WHY = "UCX probably moves it over TCP or through host memory, so handoffs take longer than they must."
CUDA_TODO = (
    "On one host the workers must see all GPUs and share a PID namespace, on two they need RDMA of 100 Gb/s: "
    '"Moving KV between GPUs" in docs/operating.md. UCX_PROTO_INFO=y makes UCX log the transport of each read.'
)
CPU_WHY = "Handoffs take longer than they must."
CPU_TODO = (
    "Check the network between the two machines and their load, then restart the reader: it measures at its start."
)


def about_kv_reads(records: list[WorkerRecord]) -> Iterator[Finding]:
    """One finding for each slow pair, and one for all others."""
    registered = {record.worker_id for record in records}
    pairs = [
        (record, read)
        for record in sorted(records, key=lambda it: it.worker_id)
        for read in sorted(record.reads_from(registered), key=lambda it: it.source_id)
    ]
    fast = []
    for record, read in pairs:
        if read.bytes_per_s < SLOW_BYTES_PER_S[read.memory]:
            yield _slow(record, read)
        else:
            fast.append(read.bytes_per_s)
    names = [
        f"{record.worker_id} from {read.source_id} at {bytes_per_second(read.bytes_per_s)}" for record, read in pairs
    ]
    if fast and len(fast) == len(pairs):
        yield Finding(area=Area.WORKERS, level=Level.OK, what=f"KV self-tests read {named(names)}")


def _slow(record: WorkerRecord, read: KvReadSpeed) -> Finding:
    memory = "GPU" if read.memory is KvMemory.CUDA else "host"
    speed = bytes_per_second(read.bytes_per_s)
    what = f"{record.worker_id} reads KV from {read.source_id} at {speed}, slow for {memory} memory."
    why, todo = (CUDA_WHY, CUDA_TODO) if read.memory is KvMemory.CUDA else (CPU_WHY, CPU_TODO)
    return Finding(area=Area.WORKERS, level=Level.WARNING, what=what, why=why, todo=todo)
