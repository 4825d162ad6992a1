"""Prompts with text that tokenizers and chat templates treat differently."""

from __future__ import annotations

from json import dumps

from shared.contracts.control import ProbePrompt
from shared.contracts.engine_paths import CHAT, COMPLETIONS

CHARS_MIN = 3000
"""Characters of the long probe: more than one piece of text (see ``segments``)."""
CHARS_PER_TOKEN_MAX = 6
"""Characters of the probes' text that make at least one token, with any tokenizer."""
BLOCKS_PROBED = 3

PROSE = "The rain had stopped before noon, and the orchard behind the mill smelled of wet leaves and apples. "
MIXTURE = (
    "It's 3.14159 or 1234567, l'été, naïve ÅÄÖ, 漢字とかな, привет 🙂👩\u200d👧!\n\n"
    "\tdef f(x):\n\t    return x  **  2  # ok\r\n  two  spaces,\u00a0no-break — “quotes” …   "
    'https://example.org/a_b?c=1&d=[2] {"k": null}\n'
)


def probes(model: str, *, block_size: int, max_model_len: int, adapter: str = "") -> list[ProbePrompt]:
    """Prompts of each kind that routers tokenize, with text that tokenizers and templates treat differently.
    ``adapter``: a LoRA adapter of the model, or empty.
    """
    chars = min(max(CHARS_MIN, BLOCKS_PROBED * block_size * CHARS_PER_TOKEN_MAX), max_model_len)
    long = (PROSE * (chars // len(PROSE) + 1))[:chars]
    mixed = (MIXTURE * (chars // (4 * len(MIXTURE)) + 1))[:chars]
    turns = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": long[: chars // 2]},
        {"role": "assistant", "content": " Well. "},
        {"role": "user", "content": [{"type": "text", "text": mixed[: chars // 2]}]},
    ]
    return [
        _probe(COMPLETIONS, model=model, prompt=long),
        _probe(COMPLETIONS, model=model, prompt=mixed, add_special_tokens=False),
        _probe(COMPLETIONS, model=model, prompt=long[: chars // 2], cache_salt="a tenant of its own"),
        _probe(CHAT, model=model, messages=turns),
        _probe(CHAT, model=model, messages=turns[1:], add_generation_prompt=False, cache_salt="sält"),
        *([_probe(COMPLETIONS, model=adapter, prompt=long, cache_salt="sält")] if adapter else []),
    ]


def _probe(path: str, **fields: object) -> ProbePrompt:
    return ProbePrompt(path=path, body=dumps(fields).encode())
