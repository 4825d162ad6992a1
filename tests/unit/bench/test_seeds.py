"""The figures of the threads: what their page says of the runs."""

from __future__ import annotations

import random
from pathlib import Path

from safetensors.numpy import load_file
from tokenizers import Tokenizer

SHARING = """## vLLM on CPUs

**Prefill-heavy**: prompts of 512 tokens.

| shared | placement | requests/s | over in turns |
|---|---|---|---|
| 0% | in turns | 5.00 |  |
| 70% | in turns | 6.00 |  |
| 70% | Baton | 9.00 | +50% |
"""


def test_the_page_takes_the_rows_of_batons_placement():
    from bench.seeds.__main__ import shared_rows

    assert shared_rows(SHARING) == [
        "| engines | load | shared | placement | requests/s | over in turns |",
        "|---|---|---|---|---|---|",
        "| vLLM on CPUs | Prefill-heavy | 70% | Baton | 9.00 | +50% |",
    ]


def test_1p1d_is_compared_with_one_engine_at_half_the_load():
    from bench.seeds import apart

    rows = [
        apart.Row("one engine", 2.0, "10 of 10", (100.0, 200.0), (20.0, 30.0), 0, 0),
        apart.Row("1P1D", 4.0, "20 of 20", (150.0, 400.0), (15.0, 18.0), 28, 3_000_000),
    ]

    text = "\n".join(apart.lines(rows, apart.Size(prompt_tokens=512, requests=10), 2.0))

    assert "TPOT p50 -25%, TTFT p50 +50%" in text
    assert "28 handoffs, 3 MB" in text
    assert "| 1P1D | 4.00 | 20 of 20 | 150.0 | 400.0 | 15.0 | 18.0 | -25% | 28 | 3 |" in text


def test_read_back_is_compared_with_and_without_the_prefix_cache():
    from bench.seeds import turns

    runs = [
        turns.Run(caching, how, (50.0, p50, 2 * p50), 20, 24, 9_000_000, tokens)
        for caching, how, p50, tokens in (
            ("on", turns.READ_BACK, 80.0, 2000),
            ("on", turns.RECOMPUTE, 100.0, 0),
            ("off", turns.READ_BACK, 90.0, 30_000),
            ("off", turns.RECOMPUTE, 270.0, 0),
        )
    ]

    text = "\n".join(turns.lines(runs, turns.Size(conversations=4, messages=12)))

    assert "TTFT p50 -20.0% with the prefill engine's prefix cache, 3.00 times as fast without" in text
    assert "| off | read-back | 20 | 50.0 | 90.0 | 180.0 | 30000 | 24 | 9 |" in text


def test_what_the_model_says_becomes_the_same_tokens_again(tmp_path: Path):
    from bench.seeds.engines import CACHE, HEAD, say_words
    from bench.wide_model import make_wide_model

    model_dir = make_wide_model(tmp_path, CACHE)
    say_words(model_dir)

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    head = load_file(model_dir / "model.safetensors")[HEAD]
    said = [number for number, row in enumerate(head) if row.any()]
    answer = random.Random(1).choices(said, k=500)

    assert len(said) > 500
    assert tokenizer.encode(tokenizer.decode(answer), add_special_tokens=False).ids == answer
