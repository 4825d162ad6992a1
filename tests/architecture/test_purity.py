"""Cores decide and do nothing else."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.sources import Source, sources

DECIDERS = (
    "connector.engine_exchange",
    "connector.holder",
    "connector.prefetch",
    "connector.reader",
    "connector.tally",
)
"""As pure as a core, and outside of one because they are given an engine's own objects, of which they know a port."""
OF_ALL_CORES = ("shared.engine_speed", "shared.words")
"""What several services' cores would say each for itself."""
CORES = [
    source
    for source in sources()
    if "/core/" in source.path or source.module in DECIDERS or source.module.startswith(OF_ALL_CORES)
]
ALLOWED = {
    "__future__", "msgspec", "dataclasses", "enum", "typing", "collections", "math", "heapq", "bisect", "hashlib",
    "itertools", "functools", "operator", "struct", "array", "re", "json", "cbor2",
}  # fmt: skip
FOR_SPEED = {"numpy"}
"""Array arithmetic where a core would be too slow without it."""
REFUSED_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}


def allowed(source: Source, module: str) -> bool:
    cores = [source.path.partition("/core/")[0].replace("/", ".") + ".core", "shared.contracts", *OF_ALL_CORES]
    if source.path.startswith(("services/worker/", "connector/")):
        cores += ["connector.core", *DECIDERS]  # What a worker decides about KV, the connector has decided before.
    top = module.partition(".")[0]
    return top in ALLOWED | FOR_SPEED or (module + ".").startswith(tuple(core + "." for core in cores))


@pytest.mark.parametrize("source", CORES, ids=lambda source: source.path)
def test_a_core_imports_only_what_it_needs_to_decide(source):
    bases = [
        (node.module or "", node.lineno) if isinstance(node, ast.ImportFrom) else (name.name, node.lineno)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    ]

    assert [f"{source.path}:{line} {module}" for module, line in bases if not allowed(source, module)] == []


@pytest.mark.parametrize("source", CORES, ids=lambda source: source.path)
def test_a_core_neither_waits_nor_keeps_globals_nor_does_io(source):
    asynchronous = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    wrong = [
        f"{source.path}:{node.lineno} {type(node).__name__}"
        for node in ast.walk(source.tree)
        if isinstance(node, (*asynchronous, ast.Global))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFUSED_CALLS)
    ]

    assert wrong == []
