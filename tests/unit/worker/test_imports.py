"""A simulated worker runs where no engine is installed."""

from __future__ import annotations

import subprocess
import sys

from tests.support.processes import ROOT


def test_a_simulated_worker_imports_neither_vllm_nor_torch_nor_nixl():
    without = "import sys; sys.modules.update(dict.fromkeys(('vllm', 'torch', 'nixl')))"

    done = subprocess.run(
        [sys.executable, "-c", f"{without}; import services.worker.service, services.worker.engines.simulated.engine"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
