"""Torch, in a process of its own: its default group is the process's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GROUPS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from services.worker.engines.vllm.gloo_groups import share_loop

if sys.argv[2] == "shared":
    share_loop()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
for group in [dist.new_group([0], backend="gloo") for _ in range(4)]:
    dist.barrier(group)
    numbers, objects, gathered = torch.ones(2), [3], [None]
    dist.all_reduce(numbers, group=group)
    dist.broadcast_object_list(objects, src=0, group=group)
    dist.all_gather_object(gathered, 5, group=group)
    assert (numbers.tolist(), objects, gathered) == ([1.0, 1.0], [3], [5])
names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
print(sum(name.startswith("gloo_tcp_loop") for name in names))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "loops"), [("shared", 1), ("own", 5)])
def test_groups_share_the_thread_that_looks_for_events(tmp_path: Path, how: str, loops: int):
    done = subprocess.run(
        [sys.executable, "-c", GROUPS, str(tmp_path / "store"), how],
        env={"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == loops
