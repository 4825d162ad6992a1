"""Every module has a purpose, says it, and is used."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

from tests.architecture.sources import ROOT, sources

FOR_TESTS = {"shared/bus/memory_bus.py": "the bus's second implementation, which keeps the port honest"}
"""Modules that no process uses, with the reason why they stand among those that do."""


def is_entry(path: str, text: str) -> bool:
    return path.endswith(("__init__.py", "__main__.py")) or 'if __name__ == "__main__"' in text


def test_every_module_is_imported_by_another_or_can_be_run():
    imported = {module for source in sources() for module, _ in source.imports() if source.module != module}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    scripts = [project["scripts"], *project["entry-points"].values()]
    imported |= {script.partition(":")[0] for group in scripts for script in group.values()}
    everything = "\n".join(source.text for source in sources())

    unused = [
        source.path
        for source in sources()
        if source.module not in imported
        and source.path not in FOR_TESTS
        and not is_entry(source.path, source.text)
        and not re.search(rf'"{re.escape(source.module)}[":.]', everything)
    ]

    assert unused == []


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.path)
def test_modules_and_public_classes_say_what_they_are(source):
    public = [
        node
        for node in source.tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]
    silent = [node.name for node in public if ast.get_docstring(node) is None]

    assert ast.get_docstring(source.tree) or not source.text.strip()
    assert [name for name in silent if name != "main"] == []
