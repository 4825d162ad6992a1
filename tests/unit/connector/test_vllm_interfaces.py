"""The interfaces of vLLM that Baton touches are listed, and are those of the releases that it was written for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from connector.layout.engine_layout import SUPPORTED, UnsupportedEngine, check_version
from tests.support.vllm_releases import RELEASES
from tests.unit.connector.vllm_interfaces import INTERFACES, differences, installed, installed_release, recorded

ROOT = Path(__file__).parents[3]
DYNAMIC = {"current_platform", "kv_cache_utils"}
"""Made at import, or a module; no source has such a name."""
GONE = {"vllm/v1/core/sched/async_scheduler.py::AsyncScheduler._update_request_with_output"}
"""In some releases; ``Scheduler._update_request_with_output`` has taken it over."""


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllms_interfaces_are_the_recorded_ones():
    changed = differences(installed(), recorded(installed_release()))

    assert not changed, "docs/vllm.md says what to do:\n" + "\n".join(changed)


def test_each_supported_release_is_locked_and_recorded():
    names = {name for names in INTERFACES.values() for name in names.split()}

    assert RELEASES.keys() == set(SUPPORTED)
    for release in SUPPORTED:
        assert {name.partition("::")[2] for name in recorded(release)} == names, (
            "python -m tests.unit.connector.vllm_interfaces --write records all releases"
        )


@pytest.mark.parametrize("release", SUPPORTED)
def test_every_listed_interface_was_found(release):
    assert {name for name, about in recorded(release).items() if about == "missing"} <= GONE


def test_everything_imported_from_vllm_is_listed():
    listed = {name.split(".")[0] for names in INTERFACES.values() for name in names.split()} | DYNAMIC
    imported = {name for folder in ("connector", "services") for name in names_of_vllm(ROOT / folder)}

    assert imported >= {"BlockPool", "AsyncLLM"}, "the search finds imports"
    assert not imported - listed


def names_of_vllm(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.33.0"])
def test_a_supported_version_is_accepted(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.0", "0.3.2", "1.32.0", "0.34.0rc1"])
def test_another_version_is_refused_with_the_supported_ones(version):
    with pytest.raises(UnsupportedEngine, match=rf"supports vLLM {SUPPORTED[0]}\.x and {SUPPORTED[1]}\.x.*{version}"):
        check_version(version)
