"""A bigger thing is two things with a missing name between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.sources import Source, sources

FILE_LINES_MAX = 300
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 7
ATTRIBUTES_MAX = 12

every_source = pytest.mark.parametrize("source", sources(), ids=lambda source: source.path)


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without the docstring."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def attributes_of(owner: ast.ClassDef) -> set[str]:
    """What the class's methods assign to ``self``."""
    return {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@every_source
def test_a_file_tells_one_story(source):
    assert len(source.text.splitlines()) <= FILE_LINES_MAX


@every_source
def test_a_function_fits_on_a_screen(source):
    too_long = {function.name: lines_of(function) for function in functions(source)}

    assert {name: lines for name, lines in too_long.items() if lines > FUNCTION_LINES_MAX} == {}


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command line's function: its parameters are the options that a person may give."""
    return any(".command" in ast.unparse(decorator) for decorator in function.decorator_list)


@every_source
def test_a_function_takes_few_parameters(source):
    counts = {function.name: parameters_of(function) for function in functions(source) if not is_command(function)}

    assert {name: count for name, count in counts.items() if count > PARAMETERS_MAX} == {}


@every_source
def test_a_class_holds_few_things(source):
    owners = [node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    counts = {owner.name: len(attributes_of(owner)) for owner in owners}

    assert {name: count for name, count in counts.items() if count > ATTRIBUTES_MAX} == {}
