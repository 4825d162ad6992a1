"""SECURITY.md names tests and settings that there are."""

from __future__ import annotations

import re

import msgspec

from services.router.settings import Settings
from tests.support.processes import ROOT

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_each_test_that_it_names_is_there():
    named = set(re.findall(r"tests/[\w/]+(?:\.py)?", PAGE))

    assert len(named) > 8
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_each_setting_that_it_names_can_be_set():
    settings = {f"ROUTER_{field.name.upper()}" for field in msgspec.structs.fields(Settings)}
    named = set(re.findall(r"ROUTER_\w+", PAGE))

    assert named
    assert named <= settings


def test_each_command_that_it_names_is_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    assert all(f"\n{target}:" in makefile for target in re.findall(r"`make (\w+)`", PAGE))
