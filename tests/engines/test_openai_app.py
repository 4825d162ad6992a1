"""What a worker leaves out of vLLM's server, and the load that it reports of vLLM's statistics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from services.worker.tiny_model import EOS_ID
from shared.contracts.engine_paths import PLACED, SERVED
from tests.engines.front import front, model_with_marks

pytestmark = pytest.mark.vllm

ANSWER = [70, EOS_ID]


async def test_the_server_keeps_no_metrics_of_http_and_finds_placed_paths_first(tmp_path):
    from services.worker.engines.vllm.openai_app import UNUSED_MIDDLEWARE

    async with front(model_with_marks(tmp_path), "", ANSWER) as serving:
        app = serving.app._app
        pieces, _record = await serving.serve({"prompt": [70] * 40, "max_tokens": 2}, path="/v1/completions")

    called, names = app.middleware_stack, set[str]()
    while called is not None:
        names.add(type(called).__name__)
        called = getattr(called, "app", None)
    assert "ExceptionMiddleware" in names
    assert not names & set(UNUSED_MIDDLEWARE)
    assert {route.path for route in app.routes[: len(PLACED)]} == set(PLACED)
    assert serving.app.paths >= set(PLACED)
    assert len(serving.app.paths & SERVED) > len(PLACED)
    assert b"".join(pieces.data_of)


def test_a_worker_keeps_no_metrics_of_vllm_but_its_other_statistics():
    from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger

    from services.worker.engines.vllm.openai_app import without_prometheus

    other = LoggingStatLogger.__new__(LoggingStatLogger)
    manager = SimpleNamespace(stat_loggers=[other, PrometheusStatLogger.__new__(PrometheusStatLogger)])

    without_prometheus(manager)

    assert manager.stat_loggers == [other]


def test_an_engines_load_is_the_last_steps_queues_and_the_sums_of_all_steps():
    from vllm.v1.metrics.stats import IterationStats, PrefillStats, SchedulerStats

    from services.worker.engines.vllm.stats import EngineMeter

    meter, changes = EngineMeter(), list[int]()
    meter.kv_tokens = 320
    meter.on_changed(lambda: changes.append(1))
    prompt = PrefillStats()
    prompt.set(100, 32, 64)
    first, second = IterationStats(), IterationStats()
    first.prompt_token_stats.update_from_output(prompt)
    first.num_generation_tokens, first.num_preempted_reqs = 1, 1
    second.num_generation_tokens, second.time_to_first_tokens_iter = 9, [1.0]
    second.inter_token_latencies_iter = [0.01, 0.15]  # Of eight tokens: with accepted drafts a step has several.

    meter.record(SchedulerStats(num_running_reqs=3, kv_cache_usage=0.1), first)
    moved = {"bytes_transferred": [5, 6], "transfer_duration": [0.5]}
    meter.record(
        SchedulerStats(
            num_running_reqs=2,
            num_waiting_reqs=1,
            num_skipped_waiting_reqs=1,
            kv_cache_usage=0.5,
            kv_connector_stats=moved,
            running_lora_adapters={"sql": 1, "mail": 0},
        ),
        second,
    )
    meter.record(None, None)
    load = meter.load()

    assert len(changes) == 3
    assert (load.running, load.waiting, load.kv_tokens_used, load.adapters_running) == (2, 2, 160, ["sql"])
    assert (load.prompt_tokens_total, load.computed_tokens_total) == (100, 4)
    assert (load.cached_tokens_total, load.received_tokens_total) == (32, 64)
    assert (load.received_bytes_total, load.received_seconds_total) == (11, 0.5)
    assert (load.generation_tokens_total, load.preemptions_total) == (10, 1)
    assert load.decode_s_per_token == pytest.approx(0.02)
