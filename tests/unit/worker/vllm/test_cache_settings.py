"""Which options of vLLM's cache Baton chooses for a model, and that the operator's own stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.engines.vllm.cache_settings import choose_cache_options, required_dtype, typed_options, unit_of
from shared.contracts.workers import Role

MAMBA2, DELTA_NET = {"mamba_n_groups": 1}, {"linear_num_value_heads": 4}


def config(
    *, device: str = "cuda", hybrid: bool = True, block: int = 544, manager_off: bool = False, **text: Any
) -> Any:
    """What is read of vLLM's configuration, with its defaults."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block, prefix_match_unit=None, prefix_cache_retention_interval=0),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=4096, max_num_seqs=256, disable_hybrid_kv_cache_manager=manager_off
        ),
        model_config=SimpleNamespace(is_hybrid=hybrid, hf_text_config=SimpleNamespace(**text)),
        device_config=SimpleNamespace(device_type=device),
    )


def set_in(given: Any) -> tuple[int | None, int | None, int]:
    cache = given.cache_config
    return (
        cache.prefix_match_unit,
        cache.prefix_cache_retention_interval,
        given.scheduler_config.max_num_batched_tokens,
    )


def test_what_is_read_exists_in_vllms_configuration():
    config = pytest.importorskip("vllm.config")

    assert config.CacheConfig().prefix_cache_retention_interval == 0
    assert config.CacheConfig().prefix_match_unit is None
    assert {"max_num_batched_tokens", "max_num_seqs", "disable_hybrid_kv_cache_manager"} <= set(
        config.SchedulerConfig.__dataclass_fields__
    )


@pytest.mark.parametrize(
    ("block", "unit"), [(1056, 96), (544, 32), (128, 128), (32, 32), (528, 48), (1040, 80), (24, 24)]
)
def test_the_unit_divides_the_block(block, unit):
    assert unit_of(block) == unit


def test_a_model_with_a_state_gets_a_unit_and_keeps_states_of_answers():
    given = config(**DELTA_NET)

    texts = choose_cache_options(given, set(), Role.DECODE)

    assert set_in(given) == (32, 8 * 544, 4096)
    assert [text.split(",")[0] for text in texts] == [
        "--prefix-match-unit 32",
        "--prefix-cache-retention-interval 4352",
    ]


def test_a_prefill_engine_keeps_states_of_prompts_only():
    given = config(**DELTA_NET)

    choose_cache_options(given, set(), Role.PREFILL)

    assert set_in(given) == (32, 0, 4096)


def test_a_cpu_computes_mamba_2_in_steps_of_a_block():
    given = config(device="cpu", block=64, **MAMBA2)

    (first, *_) = choose_cache_options(given, set(), Role.BOTH)

    assert first.startswith("--max-num-batched-tokens 64, since a CPU")
    assert set_in(given) == (None, 512, 64)
    assert given.scheduler_config.max_num_seqs == 64


@pytest.mark.parametrize("role", Role)
def test_a_model_with_windows_keeps_those_of_answers(role):
    given = config(hybrid=False, sliding_window=64)

    texts = choose_cache_options(given, set(), role)

    assert set_in(given) == (None, 0 if role is Role.PREFILL else None, 4096)
    assert len(texts) == (role is not Role.PREFILL)


def test_nothing_is_chosen_for_other_models():
    for given in (config(hybrid=False, sliding_window=None), config(hybrid=False, manager_off=True, sliding_window=64)):
        assert choose_cache_options(given, set(), Role.BOTH) == []
        assert set_in(given) == (None, 0, 4096)


def test_what_the_operator_typed_stays():
    typed = typed_options(
        "--prefix_match_unit=16 --max-num-batched-tokens 128 --prefix-cache-retention-interval 0 -tp 1"
    )
    given = config(device="cpu", **MAMBA2)

    assert choose_cache_options(given, typed, Role.BOTH) == []
    assert set_in(given) == (None, 0, 4096)


def test_a_cpu_computes_gated_delta_nets_in_bfloat16():
    assert required_dtype(config(device="cpu", **DELTA_NET), set()) == "bfloat16"
    assert required_dtype(config(device="cpu", **DELTA_NET), typed_options("--dtype float32")) == ""
    assert required_dtype(config(device="cpu", **MAMBA2), set()) == ""
    assert required_dtype(config(device="cuda", **DELTA_NET), set()) == ""
