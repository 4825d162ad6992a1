"""What workers import: a simulated one runs where no engine is installed, and a broken installation is explained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT


def test_a_simulated_worker_imports_neither_vllm_nor_torch_nor_nixl():
    without = "import sys; sys.modules.update(dict.fromkeys(('vllm', 'torch', 'nixl')))"

    done = subprocess.run(
        [sys.executable, "-c", f"{without}; import services.worker.service, services.worker.engines.simulated.engine"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr


def test_a_torchvision_for_another_torch_is_named_with_its_remedy(tmp_path: Path):
    (tmp_path / "vllm.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    start = "from services.worker.engines.vllm.engine import _import_vllm; _import_vllm()"

    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {start}"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert "EngineRefused" in done.stderr
    assert "`pip uninstall torchvision`" in done.stderr
