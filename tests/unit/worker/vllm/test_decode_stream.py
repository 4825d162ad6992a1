"""The first token of a long prompt's answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tokenizers.decoders

from services.worker.engines.vllm import decode_stream
from tests.properties.router.tokenizer_kinds import gpt_2


class Counting:
    """A tokenizer that counts what it decodes."""

    def __init__(self):
        self.tokenizer = gpt_2()
        self.decoded = []

    def decode(self, ids, **options):
        self.decoded.append(len(ids))
        return self.tokenizer.decode(ids, **options)


def test_only_the_end_of_a_prompt_is_looked_at():
    tokenizer = Counting()
    stream = decode_stream.TailDecodeStream(tokenizer.tokenizer.encode("word " * 5000).ids)

    tail = stream._tail(tokenizer)

    assert (len(tail), tokenizer.decoded) == (decode_stream.TAIL_TOKENS, [decode_stream.TAIL_TOKENS])


def test_vllm_takes_it(monkeypatch):
    detokenizer = pytest.importorskip("vllm.v1.engine.detokenizer")
    params = pytest.importorskip("vllm.sampling_params").SamplingParams()
    monkeypatch.setattr(tokenizers.decoders, "DecodeStream", tokenizers.decoders.DecodeStream)
    tokenizer = gpt_2()
    request = SimpleNamespace(
        request_id="r", sampling_params=params, prompt_token_ids=tokenizer.encode("Hello").ids, prompt_embeds=None
    )

    decode_stream.install()

    made = detokenizer.FastIncrementalDetokenizer(SimpleNamespace(_tokenizer=tokenizer), request)
    assert isinstance(made.stream, decode_stream.TailDecodeStream)
    (token,) = tokenizer.encode(" there").ids[:1]
    assert made.decode_next(token) == tokenizer.decode([token])
