"""Checkpoints of baton-tiny with other weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from services.worker.tiny_model import ensure_tiny_model
from shared.runtime.settings import CommonSettings

WEIGHTS = "model.safetensors"


def tiny_model() -> Path:
    return ensure_tiny_model(Path(CommonSettings().cache_dir))


def make_checkpoint(folder: Path, seed: int) -> Path:
    """All of baton-tiny in ``folder``, with the weights of each matrix in another order."""
    shutil.copytree(tiny_model(), folder)
    drawn = np.random.default_rng(seed)
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            tensors[name] = drawn.permuted(tensor.reshape(-1)).reshape(tensor.shape)
    (folder / WEIGHTS).unlink()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def make_broken_checkpoint(folder: Path) -> Path:
    """Readable, but its matrices have other shapes."""
    shutil.copytree(tiny_model(), folder)
    tensors = {name: tensor[..., :-1].copy() for name, tensor in load_file(folder / WEIGHTS).items()}
    (folder / WEIGHTS).unlink()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder
