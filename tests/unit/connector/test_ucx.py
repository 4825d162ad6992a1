"""UCX's defaults for GPU memory are set where there is a GPU, and the operator's values stay."""

from __future__ import annotations

import os

import pytest

from connector.transfer.agent import set_ucx_defaults

NAME = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


@pytest.mark.parametrize(
    ("devices", "own", "expected"),
    [({"cuda"}, None, "on"), ({"cuda"}, "off", "off"), ({"cpu"}, None, None)],
    ids=["gpu", "operator", "cpu"],
)
def test_reads_may_use_cuda_ipc_unless_the_operator_says_no(monkeypatch, devices, own, expected):
    monkeypatch.setenv(NAME, own or "")  # So that the value is put back after the test.
    if own is None:
        monkeypatch.delenv(NAME)

    set_ucx_defaults(devices)

    assert os.environ.get(NAME) == expected
