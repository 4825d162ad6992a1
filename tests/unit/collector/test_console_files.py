"""The console's page has no build step, no foreign code, and makes no markup from data."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import ROOT

PAGE = ROOT / "services" / "collector" / "console" / "static"
FILES = sorted(PAGE.iterdir())
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\b|new Function"
)
REFERENCES = re.compile(r"""(?:from "|import "|import\("|href="|src="|url\()(?P<name>[^"#)]+)""")
HERE = re.compile(r"(?:\./|/console/files/)(?P<name>[a-z_]+\.(?:js|css|svg))$")

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


@every_file
def test_system_text_never_becomes_markup(file):
    assert MARKUP.findall(file.read_text()) == []


@every_file
def test_all_that_the_page_needs_is_here(file):
    for reference in REFERENCES.finditer(file.read_text()):
        name = HERE.match(reference["name"])
        assert name is not None, reference["name"]
        assert (PAGE / name["name"]).exists(), reference["name"]
