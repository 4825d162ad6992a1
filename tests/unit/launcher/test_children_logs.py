"""Log files of child processes: bounded, and read from their end."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from services.launcher.system.children import FILES_MAX, older, remove, rotate, tail

MIB = 1 << 20


def test_who_has_the_file_open_goes_on_writing_into_the_current_one(tmp_path: Path):
    current = tmp_path / "w1.log"
    with current.open("ab", buffering=0) as child:
        for number in range(10):
            child.write(f"{number}".encode() * 99 + b"\n")
            rotate(current, bytes_max=150)

    files = [current, *(older(current, number) for number in range(1, FILES_MAX))]
    assert [file.read_text()[:1] for file in files] == ["", "8", "6", "4"]
    assert all(file.stat().st_size <= 200 for file in files)
    assert not older(current, FILES_MAX).exists()


def test_a_small_file_stays_as_it_is(tmp_path: Path):
    current = tmp_path / "w1.log"
    current.write_text("small\n")

    rotate(current)
    rotate(tmp_path / "none.log")

    assert [file.name for file in tmp_path.iterdir()] == ["w1.log"]


def test_a_file_that_cannot_be_kept_is_emptied_all_the_same(tmp_path: Path):
    current = tmp_path / "w1.log"
    current.write_bytes(bytes(200))
    older(current, 1).mkdir()  # nothing can be copied there, as on a full disk
    (older(current, 1) / "x").touch()
    older(current, 2).mkdir()
    (older(current, 2) / "x").touch()

    rotate(current, bytes_max=100)

    assert current.stat().st_size == 0


def test_the_tail_of_a_huge_file_costs_little_memory(tmp_path: Path):
    current = tmp_path / "w1.log"
    with current.open("wb") as sparse:
        sparse.truncate(256 * MIB)
        sparse.seek(0, 2)
        sparse.write(b"\nthe reason\n")

    tracemalloc.start()
    lines = tail(current)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert lines[-1] == "the reason\n"
    assert peak < 4 * MIB


def test_the_tail_goes_back_into_the_rotated_file(tmp_path: Path):
    current = tmp_path / "w1.log"
    current.write_text("after\n")
    older(current, 1).write_text("before\n")

    assert tail(current) == ["before\n", "after\n"]
    assert tail(tmp_path / "none.log") == []


def test_the_logs_of_an_earlier_system_are_removed(tmp_path: Path):
    for name in ("w1.log", "w1.log.1", "notes.txt"):
        (tmp_path / name).touch()

    remove(tmp_path)

    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
