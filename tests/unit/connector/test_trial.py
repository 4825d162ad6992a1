"""What ends the process of a trial is refused, and nothing is tried twice."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from connector.transfer.agent import DeadlyMetadata, TransferFailed
from connector.transfer.trial import VERDICTS_MAX, Trial, Trials, trial_command

FAKE = trial_command("tests.support.fake_nixl")


class Counted:
    """Trials with a shell command, which notes each run."""

    def __init__(self, folder: Path, command: str) -> None:
        self._file = folder / "runs"
        self.trials = Trials(["sh", "-c", f"echo >> {self._file}; cat > {folder}/trial; {command}"])

    def check(self, metadata: bytes = b"metadata", *, believe_refusals: bool = True) -> None:
        self.trials.check(metadata, None, believe_refusals=believe_refusals)

    @property
    def runs(self) -> int:
        return len(self._file.read_text().splitlines())


def test_metadata_that_can_be_loaded_is_tried_once(tmp_path):
    counted = Counted(tmp_path, "exit 0")

    for _ in range(3):
        counted.check()

    assert counted.runs == 1
    trial = msgspec.msgpack.decode((tmp_path / "trial").read_bytes(), type=Trial)
    assert (trial.metadata, trial.pieces) == (b"metadata", [])
    counted.check(b"other metadata")
    assert counted.runs == 2
    counted.trials.check(b"metadata", np.array([[4096, 8, 0]], dtype=np.uint64), believe_refusals=True)
    assert counted.runs == 3


@pytest.mark.parametrize("death", ["kill -SEGV $$", "kill -ABRT $$", "kill -XCPU $$", "exit 1", "exit 5"])
def test_metadata_that_ends_a_process_is_refused_at_once_the_second_time(tmp_path, death):
    counted = Counted(tmp_path, death)

    for believe_refusals in (True, False, True):
        with pytest.raises(DeadlyMetadata):
            counted.check(believe_refusals=believe_refusals)

    assert counted.runs == 1


@pytest.mark.parametrize("end", ["kill -KILL $$", "kill -ALRM $$", "kill -TERM $$", "exit 3"])
def test_a_trial_that_says_nothing_about_the_metadata_is_repeated(tmp_path, end):
    counted = Counted(tmp_path, end)

    for _ in range(2):
        with pytest.raises(TransferFailed, match="was not tried") as failed:
            counted.check()
        assert not isinstance(failed.value, DeadlyMetadata)

    assert counted.runs == 2


def test_a_refusal_is_believed_only_where_a_trial_can_know(tmp_path):
    counted = Counted(tmp_path, "printf NIXL_ERR_MISMATCH; exit 4")

    with pytest.raises(TransferFailed, match=r"^NIXL_ERR_MISMATCH$"):
        counted.check()
    counted.check(believe_refusals=False)

    assert counted.runs == 1


def test_a_bounded_number_of_results_is_remembered(tmp_path):
    counted = Counted(tmp_path, "exit 0")
    counted.trials._verdicts = {number.to_bytes(32): None for number in range(VERDICTS_MAX)}

    counted.check()

    assert len(counted.trials._verdicts) == VERDICTS_MAX
    counted.check()
    assert counted.runs == 1


def test_a_trial_that_cannot_be_started_is_a_failure(tmp_path):
    with pytest.raises(TransferFailed, match="trying the peer's metadata: FileNotFoundError"):
        Trials([str(tmp_path / "nothing")]).check(b"", None, believe_refusals=True)


@pytest.mark.parametrize("metadata", ["segfault", "spin", "memory", "exit"])
def test_a_process_of_a_trial_is_bounded(metadata):
    with pytest.raises(DeadlyMetadata):
        Trials(FAKE).check(metadata.encode(), None, believe_refusals=False)


def test_a_process_of_a_trial_tells_what_nixl_refused():
    with pytest.raises(TransferFailed, match=r"^connecting: nixlBackendError NIXL_ERR_MISMATCH$"):
        Trials(FAKE).check(b"mismatch", None, believe_refusals=True)
    Trials(FAKE).check(b"holder", None, believe_refusals=True)


def test_a_trial_in_a_broken_environment_says_nothing_about_the_metadata(monkeypatch):
    monkeypatch.setenv("FAKE_NIXL_BROKEN", "1")

    with pytest.raises(TransferFailed, match=r"was not tried.*no plugins"):
        Trials(FAKE).check(b"segfault", None, believe_refusals=True)
