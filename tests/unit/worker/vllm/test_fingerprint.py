"""Two engines whose KV or tokens may differ have different fingerprints."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def installed() -> None:
    """vLLM is imported when the first test runs, not by every process that collects this file."""
    pytest.importorskip("vllm.config")


HF_CONFIG = {"hidden_size": 64, "rope_parameters": {"rope_theta": 10000.0}, "_name_or_path": "/models/m"}
MODEL = {
    "model_class_overrides": {}, "code_revision": None, "model_impl": "auto", "quantization": None,
    "quantization_config": None, "disable_sliding_window": False, "override_generation_config": {},
    "generation_config": "auto", "logits_processors": None, "model": "/models/m", "tokenizer": "/models/m", "revision": None,
    "tokenizer_revision": None, "seed": 0, "multimodal_config": None, "dtype": "float32", "is_hybrid": False,
}  # fmt: skip
PARTS = {
    "cache": {
        "kv_cache_dtype_skip_layers": [],
        "prefix_caching_hash_algo": "sha256_cbor",
        "prefix_match_unit": None,
        "block_size": 32,
        "mamba_cache_dtype": "auto",
        "mamba_ssm_cache_dtype": "auto",
        "mamba_cache_mode": "align",
    },
    "scheduler": {"disable_hybrid_kv_cache_manager": False},
    "attention": {"backend": None, "backend_per_kind": {}},
    "load": {"load_format": "auto"},
}


def config(
    hf: dict[str, Any] | None = None,
    draft: Any = None,
    lora: Any = None,
    connector: str = "NixlConnector",
    **changes: dict[str, Any],
) -> SimpleNamespace:
    """What ``options`` reads of vLLM's configuration; ``changes`` are of its parts."""
    hf_config = SimpleNamespace(to_dict=lambda: HF_CONFIG | (hf or {}))
    parts = {f"{name}_config": SimpleNamespace(**(given | changes.get(name, {}))) for name, given in PARTS.items()}
    model = SimpleNamespace(hf_config=hf_config, **(MODEL | changes.get("model", {})))
    transfer = SimpleNamespace(kv_connector=connector)
    return SimpleNamespace(
        model_config=model, speculative_config=draft, lora_config=lora, kv_transfer_config=transfer, **parts
    )


def options(*args: Any, **named: Any) -> str:
    from services.worker.engines.vllm.fingerprint import options as made

    return made(*args, **named)


def changed(one: str, other: str) -> set[str]:
    """Names of the options that differ."""
    return {pair.partition("=")[0] for pair in set(one.split()) ^ set(other.split())}


def test_what_is_read_exists_in_vllms_configuration():
    from vllm.config import (
        AttentionConfig,
        CacheConfig,
        LoadConfig,
        LoRAConfig,
        ModelConfig,
        SchedulerConfig,
        SpeculativeConfig,
    )

    for kind, read in (
        (ModelConfig, {*MODEL, "hf_config"} - {"is_hybrid"}),
        (CacheConfig, set(PARTS["cache"])),
        (AttentionConfig, set(PARTS["attention"])),
        (LoadConfig, set(PARTS["load"])),
        (SchedulerConfig, set(PARTS["scheduler"])),
        (SpeculativeConfig, {"method", "model", "revision"}),
        (LoRAConfig, set(vars(lora()))),
    ):
        assert read <= {one.name for one in fields(kind)}, kind
    assert isinstance(ModelConfig.is_hybrid, property)


def test_the_place_of_a_model_is_no_difference():
    moved = {"_name_or_path": "/elsewhere/m", "_commit_hash": None, "transformers_version": "9"}

    assert options(config(moved, model={"model": "/x", "tokenizer": "/x"})) == options(config())


def other_generation_file(place: str, **values: Any) -> dict[str, Any]:
    """--generation-config with a folder, as vLLM has it."""
    return {"generation_config": place, "try_get_generation_config": lambda: values}


def test_the_place_of_a_generation_file_is_no_difference():
    here, there = (config(model=other_generation_file(place, top_k=3)) for place in ("/here", "/there"))

    assert options(here) == options(there)


class Backend:
    name = "TRITON_ATTN"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("config", {"hf": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}}),
        ("quantization", {"model": {"quantization": "awq"}}),
        ("quantization_config", {"model": {"quantization_config": {"bits": 4}}}),
        ("code", {"model": {"code_revision": "abc"}}),
        ("impl", {"model": {"model_impl": "transformers"}}),
        ("class_overrides", {"model": {"model_class_overrides": {"A": "b:C"}}}),
        ("windows_off", {"model": {"disable_sliding_window": True}}),
        ("generation", {"model": {"override_generation_config": {"temperature": 0.5}}}),
        ("generation_from", {"model": {"generation_config": "vllm"}}),
        ("generation_from", {"model": other_generation_file("/other", eos_token_id=[1, 2])}),
        ("logits_processors", {"model": {"logits_processors": ["a.b:C"]}}),
        ("tokenizer", {"model": {"tokenizer": "/models/t"}}),
        ("tokenizer_revision", {"model": {"tokenizer_revision": "abc"}}),
        ("media", {"model": {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"max_pixels": 64})}}),
        ("weights", {"load": {"load_format": "dummy"}}),
        ("kv_skips", {"cache": {"kv_cache_dtype_skip_layers": ["0"]}}),
        ("hash", {"cache": {"prefix_caching_hash_algo": "sha256"}}),
        ("attention", {"attention": {"backend": Backend}}),
        ("attention_kinds", {"attention": {"backend_per_kind": {"mla": Backend}}}),
        ("hybrid_manager_off", {"scheduler": {"disable_hybrid_kv_cache_manager": True}}),
        ("draft", {"draft": SimpleNamespace(method="eagle", model="/models/d", revision=None)}),
    ],
)
def test_each_option_that_changes_kv_or_tokens_counts(name, other):
    assert changed(options(config()), options(config(**other))) == {name}


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [
        ("hash_seed", "PYTHONHASHSEED", "7"),
        ("kv_layout", "VLLM_KV_CACHE_LAYOUT", "HND"),
        ("mla_off", "VLLM_MLA_DISABLE", "1"),
    ],
)
def test_each_variable_of_vllm_counts(monkeypatch, name, variable, value):
    monkeypatch.delenv(variable, raising=False)
    before = options(config())

    monkeypatch.setenv(variable, value)

    assert changed(before, options(config())) == {name}


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"prefix_match_unit": 16}, "unit"),
        ({"block_size": 64}, "block"),
        ({"mamba_ssm_cache_dtype": "float32"}, "states"),
        ({"mamba_cache_dtype": "float32"}, "states"),
    ],
)
def test_what_changes_states_counts_for_models_that_have_them(other, name):
    hybrid = {"is_hybrid": True}

    assert changed(options(config(model=hybrid)), options(config(model=hybrid, cache=other))) == {name}
    assert options(config()) == options(config(cache=other))


def test_where_states_are_kept_can_be_read():
    """`baton doctor` tells the operator of two engines that differ here."""
    text = options(config(model={"is_hybrid": True}, cache={"prefix_match_unit": 96, "block_size": 1056}))

    assert {"unit=96", "block=1056"} <= set(text.split())


def test_the_layout_of_states_counts(monkeypatch):
    before = options(config(model={"is_hybrid": True}))

    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")

    assert changed(before, options(config(model={"is_hybrid": True}))) == {"states"}


def test_baton_exchanges_kv_between_layouts(monkeypatch):
    before = options(config(connector="BatonConnector"))

    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")

    assert options(config(connector="BatonConnector")) == before


def lora(**given: object) -> SimpleNamespace:
    values = {"lora_dtype": "float32", "target_modules": None, "enable_tower_connector_lora": False}
    values |= {"enable_mixed_moe_lora_format": False, "enable_moe_shared_loras": False}
    return SimpleNamespace(**{**values, **given})


def test_lora_counts_only_where_it_changes_what_adapters_compute():
    plain = options(config())

    assert options(config(lora=lora())) == plain
    assert changed(plain, options(config(lora=lora(lora_dtype="bfloat16")))) == {"lora"}
    assert changed(plain, options(config(lora=lora(target_modules=["q_proj"])))) == {"lora"}


def test_the_key_contains_the_options():
    import msgspec

    from tests.support.fleet_builders import FINGERPRINT

    assert msgspec.structs.replace(FINGERPRINT, options="quantization=awq").key() != FINGERPRINT.key()
