"""The check of the product's structure refuses docstrings that only continue the line above."""

from __future__ import annotations

import ast

import pytest

from scripts.check_structure import Module, fragments, long_lines


def found(text: str) -> list[str]:
    return list(fragments({"m": Module("m", "m.py", text, ast.parse(text))}))


@pytest.mark.parametrize(
    "words",
    [
        "Likewise.",
        "Of these, for the prompt.",
        "By worker; none twice.",
        "Its version.",
        "Those that run.",
        "This is the last one.",
        "For late reports.",
        "From 1; None: the whole file.",
        "In order of last use: the oldest first.",
        "After 0.5 s.",
        "See above.",
    ],
)
def test_an_attribute_whose_words_need_the_line_above_is_refused(words: str):
    (problem,) = found(f'"""A module."""\n\nX = 1\n"""{words}"""\n')

    assert problem.startswith("m.py:4 ")


@pytest.mark.parametrize(
    "words",
    [
        "Requests that run.",
        "This worker's address.",
        "With fewer requests per minute, shares are noise.",
        "Whether a key is needed.",
        "Formats of answers.",
        "None: not known.",
    ],
)
def test_an_attribute_whose_words_stand_alone_is_accepted(words: str):
    assert found(f'class A:\n    x: int\n    """{words}"""\n') == []


def test_functions_begin_with_any_phrase_but_a_continuation():
    assert found('def f():\n    """For operators."""\n') == []
    assert len(found('def f():\n    """Of all requests."""\n')) == 1


@pytest.mark.parametrize("line", ["word " * 30, f"* {'word ' * 30}", f"| {'word ' * 60} |"])
def test_a_document_has_no_long_prose_and_no_essay_in_a_table(line):
    assert list(long_lines("a.md", f"# Title\n\n{line}\n")) != []


@pytest.mark.parametrize(
    "lines", [f"```sh\n{'word ' * 30}\n```", f"| {'word ' * 30} |", f"# {'word ' * 30}", f"[a]: {'x' * 120}"]
)
def test_what_cannot_be_wrapped_may_be_long(lines):
    assert not list(long_lines("a.md", lines))
