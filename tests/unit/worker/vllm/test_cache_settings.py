"""Which options of vLLM's cache Baton chooses for a model, and that the operator's own stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.engines.vllm.cache_settings import (
    choose_cache_options,
    required_dtype,
    retains_answers,
    typed_options,
    unit_of,
)
from shared.contracts.workers import Role

DELTA_NET = {"linear_num_value_heads": 4}


def config(
    *,
    device: str = "cuda",
    hybrid: bool = True,
    block: int = 16,
    chunk: int | None = None,
    caching: bool = True,
    **text: Any,
) -> SimpleNamespace:
    """What is read of vLLM's configuration, with its defaults."""
    model = SimpleNamespace(is_hybrid=hybrid, attention_chunk_size=chunk, hf_text_config=SimpleNamespace(**text))
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block, prefix_match_unit=None, enable_prefix_caching=caching),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=4096, max_num_seqs=256, disable_hybrid_kv_cache_manager=False
        ),
        model_config=model,
        device_config=SimpleNamespace(device_type=device),
    )


def test_what_is_read_exists_in_vllms_configuration():
    config = pytest.importorskip("vllm.config")

    assert config.CacheConfig().prefix_match_unit is None
    assert {"max_num_batched_tokens", "max_num_seqs", "disable_hybrid_kv_cache_manager"} <= set(
        config.SchedulerConfig.__dataclass_fields__
    )


@pytest.mark.parametrize(
    ("block", "unit"), [(16, 16), (32, 32), (1056, 96), (544, 32), (128, 128), (528, 48), (1040, 80), (24, 24)]
)
def test_the_unit_divides_the_block(block, unit):
    assert unit_of(block) == unit


def test_a_model_with_a_state_gets_a_unit():
    """VLLM makes the block longer when it knows the state, as a multiple of what it is now."""
    given = config(block=544, **DELTA_NET)

    texts = choose_cache_options(given, set(), Role.DECODE)

    assert given.cache_config.prefix_match_unit == 32
    assert [text.split(",")[0] for text in texts] == ["--prefix-match-unit 32", "--prefix-cache-retention-interval"]


@pytest.mark.parametrize(("role", "retains"), [(Role.PREFILL, False), (Role.DECODE, True), (Role.BOTH, True)])
def test_engines_that_answer_keep_what_the_next_turn_needs(role, retains):
    assert retains_answers(set(), role) is retains
    assert len(choose_cache_options(config(hybrid=False, sliding_window=64), set(), role)) == retains


def test_chunks_keep_all_their_blocks():
    """VLLM would keep the last chunk of a prefix only."""
    given = config(hybrid=False, chunk=64)

    assert choose_cache_options(given, set(), Role.BOTH)[0].startswith("--disable-hybrid-kv-cache-manager")
    assert given.scheduler_config.disable_hybrid_kv_cache_manager is True


def test_windows_keep_all_their_blocks_where_no_prefix_cache_does():
    """An ended prompt keeps the window after its last token. A reader needs that before the boundary."""
    given = config(hybrid=False, caching=False, sliding_window=64)
    plain = config(hybrid=False, caching=False)

    assert choose_cache_options(given, set(), Role.BOTH)[0].startswith("--disable-hybrid-kv-cache-manager")
    assert given.scheduler_config.disable_hybrid_kv_cache_manager is True
    assert choose_cache_options(plain, set(), Role.BOTH) == []
    assert plain.scheduler_config.disable_hybrid_kv_cache_manager is False


def test_nothing_is_chosen_for_other_models():
    given = config(hybrid=False, sliding_window=None)

    assert choose_cache_options(given, set(), Role.BOTH) == []
    assert given == config(hybrid=False, sliding_window=None)


def test_what_the_operator_typed_stays():
    typed = typed_options(
        "--prefix_match_unit=16 --max-num-batched-tokens 128 --prefix-cache-retention-interval 0 -tp 1"
    )
    given = config(device="cpu", mamba_n_groups=1)

    assert choose_cache_options(given, typed, Role.BOTH) == []
    assert not retains_answers(typed, Role.DECODE)
    assert given == config(device="cpu", mamba_n_groups=1)


def test_a_cpu_has_no_unit_for_mamba_2_as_it_keeps_no_state_within_a_step():
    given = config(device="cpu", mamba_n_groups=1)

    choose_cache_options(given, {"--max-num-batched-tokens"}, Role.PREFILL)

    assert given.cache_config.prefix_match_unit is None


def test_a_cpu_computes_gated_delta_nets_in_bfloat16():
    assert required_dtype(config(device="cpu", **DELTA_NET), set()) == "bfloat16"
    assert required_dtype(config(device="cpu", **DELTA_NET), typed_options("--dtype float32")) == ""
    assert required_dtype(config(device="cpu", mamba_n_groups=1), set()) == ""
    assert required_dtype(config(device="cuda", **DELTA_NET), set()) == ""
