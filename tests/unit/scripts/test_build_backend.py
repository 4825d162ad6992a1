"""A distribution has all packages inside one, and every name of a module says so."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from scripts.build_backend import PACKAGES, CannotRename, project_file, renamed
from tests.support.processes import ROOT


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from services.router import native\n", "from baton_serve.services.router import native\n"),
        ("from shared import compiled\n", "from baton_serve.shared import compiled\n"),
        ("import shared  # noqa: F401\nprint(shared)\n", "from baton_serve import shared  # noqa: F401\nprint(shared)\n"),
        ("def f():\n    import shared.bus.wire\n", "def f():\n    import baton_serve.shared.bus.wire\n"),
        ("import shared.bus.wire as wire\n", "import baton_serve.shared.bus.wire as wire\n"),
        ("'services.worker'\n", "'baton_serve.services.worker'\n"),
        ("x = f'{p} -m services.worker {n}'\n", "x = f'{p} -m baton_serve.services.worker {n}'\n"),
        ("x = f'{{{p}}} services.worker {n}'\n", "x = f'{{{p}}} baton_serve.services.worker {n}'\n"),
        ("x = '''\nsee services.worker\n''', 'é', 'shared.bus'\n", "x = '''\nsee baton_serve.services.worker\n''', 'é', 'baton_serve.shared.bus'\n"),
        ("'connector.transfer.nixl_agent:NixlAgent'\n", "'baton_serve.connector.transfer.nixl_agent:NixlAgent'\n"),
    ],
)  # fmt: skip
def test_imports_and_texts_name_modules_inside_the_namespace(source: str, expected: str):
    assert renamed(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "def f(services):\n    return services.router.now(), 'all is shared.Then', 'services/router'\n",
        "from vllm import connector\nfrom nats.shared import bus\nimport services_of\n",
        "x = services.worker  # of services.worker\n",
        "raise Failed from services\n",
        "x = 'acme.services.worker', 'baton_serve.services.worker'\n",
    ],
)
def test_what_only_looks_like_a_module_of_ours_stays(source: str):
    assert renamed(source) == source


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("name = f'services.{each}'\n", "write whole names"),
        ("import shared.bus\nshared.bus.wire\n", "import from it"),
        ("if x: import shared\n", "not the first of its line"),
        ("if x: from services.router import native\n", "not the first of its line"),
    ],
)
def test_what_cannot_be_renamed_is_refused(source: str, why: str):
    with pytest.raises(CannotRename, match=why):
        renamed(source)


@pytest.mark.slow
def test_every_module_can_be_renamed():
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py*")]

    for path in (one for one in paths if one.suffix in {".py", ".pyi"}):
        source = renamed(path.read_text())
        ast.parse(source)
        assert "baton_serve.baton_serve" not in source, path


def test_the_project_file_names_what_is_there_then():
    project = tomllib.loads(project_file((ROOT / "pyproject.toml").read_text()))

    assert project["build-system"] == {"requires": ["setuptools>=77"], "build-backend": "setuptools.build_meta"}
    assert project["project"]["scripts"] == {"baton": "baton_serve.services.launcher.cli:main"}
    built = project["tool"]["setuptools"]
    assert built["packages"]["find"]["include"] == ["baton_serve*"]
    inside = [one["name"] for one in built["ext-modules"]] + [name for name in built["package-data"] if name != "*"]
    inside += [path for one in built["ext-modules"] for path in one["sources"] + one["depends"]]
    assert [name for name in inside if not re.match(r"baton_serve[./]", name)] == []


def test_manifests_of_images_name_modules_of_the_wheel():
    """Images hold the wheel, not a checkout."""
    folders = ("compose", "kubernetes", "services/launcher/service_files")
    files = [ROOT / "compose.yaml", *(path for each in folders for path in (ROOT / each).rglob("*[!c]"))]
    texts = [path.read_text() for path in files if path.is_file()]
    named = [name for text in texts for name in re.findall(r"""-m["', ]+([\w.]*\b(?:services)\.[\w.]+)""", text)]

    assert len(named) >= 12
    for name in named:
        assert name.startswith("baton_serve."), name
        assert Path(ROOT, *name.split(".")[1:], "__main__.py").is_file(), name
