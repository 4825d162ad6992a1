"""What a process reports about the disks that it writes to."""

from __future__ import annotations

import shutil
from pathlib import Path

from shared.contracts.control import DiskFolder
from shared.runtime.state_folder import measure_disks


def test_folders_on_one_file_system_are_one_measurement_also_before_they_exist(tmp_path: Path):
    (tmp_path / "nats").mkdir()

    (space,) = measure_disks(tmp_path)
    (later,) = measure_disks(tmp_path / "not" / "yet")

    assert space.folder is later.folder is DiskFolder.STATE
    assert space.size_bytes == shutil.disk_usage(tmp_path).total
    assert 0 < space.free_bytes <= space.size_bytes


def test_a_folder_on_another_file_system_is_measured_by_itself(tmp_path: Path):
    (tmp_path / "logs").symlink_to("/proc")

    assert [space.folder for space in measure_disks(tmp_path)] == [DiskFolder.STATE, DiskFolder.LOGS]
