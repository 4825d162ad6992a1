"""The engine's own tokenizer, in the form that routers take."""

from __future__ import annotations

from typing import Any

from services.worker.engines.port import TokenizerFiles


def tokenizer_files(tokenizer: Any, chat_template: str) -> TokenizerFiles:
    """From the tokenizer that the engine itself uses; ``chat_template`` is the operator's, if one was given."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return TokenizerFiles(
            tokenizer_json=b"",
            chat_template="",
            special_tokens={},
            adds_special_tokens=True,
            note=f"{type(tokenizer).__name__} has no tokenizer.json: routers cannot compute its tokens",
        )
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return TokenizerFiles(
        tokenizer_json=backend.to_str().encode(),
        chat_template=chat_template or _own_template(tokenizer.chat_template),
        special_tokens=special,
        adds_special_tokens=True,
    )


def _own_template(template: Any) -> str:
    """A model may have several templates by name."""
    if isinstance(template, dict):
        return str(template.get("default", ""))
    return template or ""
