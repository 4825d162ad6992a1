"""Writes the manifests of kubernetes/base from Baton's Helm chart and kubernetes/fleet.toml: python -m
scripts.render_kubernetes. It needs helm, which $HELM names if it is elsewhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / "kubernetes"
BASE = KUBERNETES / "base"
NAMESPACE = "baton"
BY_HAND = ("namespace.yaml",)
OF_HELM = re.compile(r"^# Source: .*\n|^  annotations:\n(?:    helm\.sh/.*\n)+", re.MULTILINE)
"""What only helm needs: the order in which it applies the objects, and where they come from."""
KUSTOMIZATION = """# `python -m scripts.render_kubernetes` writes this folder; docs/kubernetes.md tells how to use it.
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: baton
resources:
"""
RENDER_S_MAX = 120.0


def rendered(helm: str) -> dict[str, str]:
    """The files of the base, by name."""
    with tempfile.TemporaryDirectory() as scratch:
        chart, out = Path(scratch, "chart"), Path(scratch, "out")
        init = [sys.executable, "-m", "services.launcher", "init", str(chart), "--kubernetes"]
        run([*init, str(KUBERNETES / "fleet.toml")])
        values = str(chart / "fleet.yaml")
        run([helm, "template", "baton", str(chart), "-f", values, "-n", NAMESPACE, "--output-dir", str(out)])
        files = {each.name: tidy(each.read_text()) for each in out.glob("baton/templates/*")}
    listed = "".join(f"  - {name}\n" for name in sorted([*files, *BY_HAND]))
    return {**files, "kustomization.yaml": KUSTOMIZATION + listed}


def tidy(text: str) -> str:
    return re.sub(r"\n+(---\n|$)", r"\n\1", OF_HELM.sub("", text).lstrip("-\n"))


def run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=RENDER_S_MAX)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


def main() -> None:
    files = rendered(os.environ.get("HELM", "helm"))
    for path in BASE.glob("*.yaml"):
        if path.name not in BY_HAND:
            path.unlink()
    for name, text in files.items():
        (BASE / name).write_text(text)
    print(f"Written: {len(files)} files in {BASE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
