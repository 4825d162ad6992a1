"""What pip and other front ends call to build this project (PEP 517).

A distribution has all packages inside one, ``baton_serve``, because others install ``services`` or ``shared``, too. So
it is built from a copy of the checkout in which the folders are below that one, and imports and other names of modules
begin with it. The copy builds like any project of setuptools; it is what a source distribution holds. An editable
installation, as ``make setup`` makes it, is of the checkout itself.
"""

from __future__ import annotations

import ast
import io
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # What else front ends call, as setuptools has it.

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "baton_serve"
PACKAGES = ("services", "shared", "connector", "replay")
BESIDE = ("setup.py", "README.md", "LICENSE")
COMMIT = "commit.txt"
"""Read by ``services.launcher.version``."""
NO_SOURCES = shutil.ignore_patterns("__pycache__", "*.so", "compiled.sha256")
INIT = (
    '"""Baton. Its parts are packages of their own in the repository, and inside this one where it is installed."""\n'
)
EITHER = "|".join(PACKAGES)
MODULE = re.compile(rf"(?<![\w./])({EITHER})\.(\w+)")
"""In texts: what may name a module, or something in one."""
COMPUTED = re.compile(rf"(?<![\w./])(?:{EITHER})\.\{{\w")
"""An f-string with a name of which only the beginning is known."""
TEXTS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
BETWEEN = {tokenize.ENCODING, tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT}
"""Tokens after which a statement may begin."""


class CannotRename(Exception):
    """Source text that would mean something else under its new name; the message names the line."""


def build_wheel(folder: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    return _in_copy(build_meta.build_wheel, folder, config_settings, metadata_directory)


def build_sdist(folder: str, config_settings: Any = None) -> str:
    return _in_copy(build_meta.build_sdist, folder, config_settings)


def prepare_metadata_for_build_wheel(folder: str, config_settings: Any = None) -> str:
    return _in_copy(build_meta.prepare_metadata_for_build_wheel, folder, config_settings)


def _in_copy(build: Callable[..., str], folder: str, *others: Any) -> str:
    folder = str(Path(folder).resolve())
    with copy() as project, chdir(project):
        return build(folder, *others)


@contextmanager
def copy() -> Iterator[Path]:
    """The project as it is distributed, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="baton-build-") as scratch:
        project = Path(scratch)
        inner = project / NAMESPACE
        for name in PACKAGES:
            shutil.copytree(ROOT / name, inner / name, ignore=NO_SOURCES)
        for name in BESIDE:
            shutil.copy(ROOT / name, project)
        (inner / "__init__.py").write_text(INIT)
        (inner / COMMIT).write_text(commit())
        for path in (*inner.rglob("*.py"), *inner.rglob("*.pyi")):
            path.write_text(_renamed(path))
        for path in (*inner.rglob("*.c"), *inner.rglob("*.h")):
            path.write_text(MODULE.sub(_module, path.read_text()))
        (project / "pyproject.toml").write_text(project_file((ROOT / "pyproject.toml").read_text()))
        (project / "MANIFEST.in").write_text(f"recursive-include {NAMESPACE} *.h\n")
        yield project


def commit() -> str:
    """The checkout's, with ``-dirty`` if files differ from it; empty outside of git. BATON_COMMIT holds before it."""
    if given := os.environ.get("BATON_COMMIT"):
        return given
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _renamed(path: Path) -> str:
    try:
        return renamed(path.read_text())
    except CannotRename as why:
        raise CannotRename(f"{path}: {why}") from None


def renamed(source: str) -> str:
    """A module's source with the names that our modules have in a distribution: in imports and in texts. Raises
    CannotRename.
    """
    if computed := COMPUTED.search(source):
        raise CannotRename(f"{computed[0]!r} begins the name of a module: write whole names")
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    pieces, done = [], 0
    for before, word, name, after in zip([None, *tokens], tokens, tokens[1:], tokens[2:], strict=False):
        begins = before is None or before.type in BETWEEN
        at, end = starts[word.start[0] - 1] + word.start[1], starts[word.end[0] - 1] + word.end[1]
        if word.type in TEXTS:
            pieces += [source[done:at], MODULE.sub(_module, source[at:end])]
            done = end
        elif begins and word.string in {"from", "import"} and name.string in PACKAGES:
            is_whole = word.string == "import" and after.string != "."
            pieces += [source[done:at], f"from {NAMESPACE} import" if is_whole else f"{word.string} {NAMESPACE}."]
            done = end if is_whole else end + 1
    text = "".join([*pieces, source[done:]])
    check(text)
    return text


def _module(found: re.Match[str]) -> str:
    """The name inside the namespace, if it is one of a module of ours: ``shared.x`` may be a sentence's end."""
    inside = ROOT / found[1] / found[2]
    return f"{NAMESPACE}.{found[0]}" if inside.is_dir() or inside.with_suffix(".py").is_file() else found[0]


def check(text: str) -> None:
    """That all names of ours are inside the namespace. Raises CannotRename."""
    tree = ast.parse(text)
    whole = {each.name: each for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    origins = {node.module or "": node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    for name, node in {**whole, **origins}.items():
        if name.partition(".")[0] in PACKAGES:
            raise CannotRename(f"line {node.lineno}: the import of {name} is not the first of its line")
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name, node in whole.items():
        outer, _, inner = name.partition(".")
        if outer == NAMESPACE and node.asname is None and inner.partition(".")[0] in used:
            raise CannotRename(f"line {node.lineno}: import {inner} gives no name that could be used; import from it")


def project_file(text: str) -> str:
    """pyproject.toml of the copy."""
    text = re.sub(
        r"^build-backend = .*\nbackend-path = .*$", 'build-backend = "setuptools.build_meta"', text, flags=re.MULTILINE
    )
    text = re.sub(r'^include = \["services\*".*$', f'include = ["{NAMESPACE}*"]', text, flags=re.MULTILINE)
    return re.sub(rf'"(?=(?:{EITHER})(?P<dot>[./]))', lambda found: f'"{NAMESPACE}{found["dot"]}', text)
