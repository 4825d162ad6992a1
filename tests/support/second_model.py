"""A second model for simulated engines: the tokenizer of baton-tiny under another name."""

from __future__ import annotations

import shutil
from pathlib import Path

from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.runtime.settings import CommonSettings


def second_model(folder: Path) -> str:
    """The model's name, which is its path."""
    model = folder / "second"
    shutil.copytree(ensure_tiny_tokenizer(Path(CommonSettings().cache_dir)), model)
    (model / "config.json").write_text("{}")
    return str(model)
