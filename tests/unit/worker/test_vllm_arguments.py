"""What a worker tells vLLM; needs no vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading

import pytest

from services.worker.engines.daemon_thread import in_daemon_thread
from services.worker.engines.vllm_arguments import arguments
from services.worker.engines.vllm_environment import engine_threads, free_port, parse_cores
from services.worker.settings import Settings


def line(settings: Settings, *, on_cpu: bool = True, otlp_endpoint: str = "") -> list[str]:
    return arguments(settings, "/models/m", on_cpu=on_cpu, events=("ipc://a", "ipc://b"), otlp_endpoint=otlp_endpoint)


def value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_operators_own_arguments_come_last_and_win():
    typed = line(Settings(engine_args="--dtype bfloat16 --max-num-seqs 8"))

    assert typed[-4:] == ["--dtype", "bfloat16", "--max-num-seqs", "8"]


def test_a_failed_read_is_recomputed_and_hashes_are_everybodys():
    typed = line(Settings())

    assert json.loads(value(typed, "--kv-transfer-config"))["kv_load_failure_policy"] == "recompute"
    assert value(typed, "--prefix-caching-hash-algo") == "sha256_cbor"
    assert value(typed, "--block-size") == "32"


def test_a_gpu_keeps_vllms_own_choices():
    typed = line(Settings(), on_cpu=False)

    for name in ("--enforce-eager", "--dtype", "--distributed-executor-backend", "--kv-cache-memory-bytes"):
        assert name not in typed


def test_tracing_is_asked_for_only_with_an_endpoint():
    assert "--otlp-traces-endpoint" not in line(Settings())
    assert (
        value(line(Settings(), otlp_endpoint="http://h:4318/"), "--otlp-traces-endpoint") == "http://h:4318/v1/traces"
    )


def test_cores_are_numbers_and_ranges():
    assert parse_cores("0,2-4") == [0, 2, 3, 4]
    assert parse_cores("") == sorted(os.sched_getaffinity(0))
    with pytest.raises(ValueError):
        parse_cores("first")


def test_the_engines_threads_are_set_up_for_its_process_only():
    before = dict(os.environ)

    with engine_threads([2, 3]):
        assert os.environ["OMP_NUM_THREADS"] == "2"
        assert os.environ["OMP_PLACES"] == "{2},{3}"

    assert dict(os.environ) == before


def test_a_taken_port_is_not_chosen():
    with socket.socket() as taken:
        port = free_port("127.0.0.1")
        taken.bind(("127.0.0.1", port))

        assert free_port("127.0.0.1") != port


def test_a_foreign_address_is_refused_with_what_to_do():
    with pytest.raises(OSError, match="WORKER_KV_HOST"):
        free_port("192.0.2.1")


async def test_work_in_a_daemon_thread_answers_or_raises():
    def fail() -> None:
        raise ValueError("no")

    assert await in_daemon_thread(lambda: threading.current_thread().daemon)
    with pytest.raises(ValueError, match="no"):
        await in_daemon_thread(fail)


async def test_nobody_waits_for_work_that_was_given_up():
    may_end = threading.Event()
    work = asyncio.create_task(in_daemon_thread(may_end.wait))
    await asyncio.sleep(0)

    work.cancel()

    with pytest.raises(asyncio.CancelledError):
        await work
    may_end.set()
