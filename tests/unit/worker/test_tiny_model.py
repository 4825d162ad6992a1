"""The tiny model."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import jinja2
import pytest
from tokenizers import Tokenizer

from services.worker.tiny_model import BOS_ID, EOS_ID, SPECIAL_TOKENS, ensure_tiny_model, ensure_tiny_tokenizer

safetensors_numpy = pytest.importorskip("safetensors.numpy")


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def render(directory, messages, **values):
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    template = jinja2.Environment().from_string(settings["chat_template"])
    return template.render(messages=messages, bos_token=settings["bos_token"], **values)


def test_two_machines_make_the_same_model_within_seconds(tmp_path):
    started = time.monotonic()
    first, second = ensure_tiny_model(tmp_path / "a"), ensure_tiny_model(tmp_path / "b")

    assert first.name == second.name
    assert contents(first) == contents(second)
    assert time.monotonic() - started < 60.0


def test_concurrent_processes_make_the_model_once(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: ensure_tiny_model(tmp_path), range(4)))

    assert len(set(paths)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {paths[0].name, "baton-tiny.lock"}


def test_the_model_and_the_light_tokenizer_agree(tmp_path):
    model, tokenizer = ensure_tiny_model(tmp_path), ensure_tiny_tokenizer(tmp_path)

    for name, content in contents(tokenizer).items():
        assert (model / name).read_bytes() == content


def test_config_weights_and_tokenizer_fit_each_other(tmp_path):
    directory = ensure_tiny_model(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    weights = safetensors_numpy.load_file(directory / "model.safetensors")

    assert config["vocab_size"] == tokenizer.get_vocab_size() == len(weights["lm_head.weight"])
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert (config["bos_token_id"], config["eos_token_id"]) == (BOS_ID, EOS_ID)


@pytest.mark.parametrize("text", ["Hello, world", "naïve 你好 🙂", '{"a": [1, 2]}\n\tx', ""])
def test_any_text_becomes_tokens_and_comes_back(tmp_path, text):
    tokenizer = Tokenizer.from_file(str(ensure_tiny_tokenizer(tmp_path) / "tokenizer.json"))
    ids = tokenizer.encode(text).ids

    assert ids[0] == BOS_ID
    assert tokenizer.decode(ids) == text


def test_the_chat_template_knows_roles_tools_parts_and_tool_calls(tmp_path):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Two "}, {"type": "text", "text": "parts"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "3"},
    ]
    text = render(
        ensure_tiny_tokenizer(tmp_path), messages, tools=[{"function": {"name": "f"}}], add_generation_prompt=True
    )

    assert text == (
        '<|bos|><|system|>\nTools, one in a line:\n{"function": {"name": "f"}}\n'
        "<|system|>\nBe kind.\n<|user|>\nTwo parts\n"
        '<|assistant|>\n\n{"name": "f", "arguments": {"a": 1}}\n<|tool|>\n3\n<|assistant|>\n'
    )
