"""`baton top` and `baton report` on a running system."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import re
import select
import struct
import subprocess
import termios
import time

import pytest

from tests.support.prompts import VOCABULARY
from tests.support.system import System, baton, command, environment, until

pytestmark = pytest.mark.nats

REQUESTS = 3
LINES, COLUMNS = 30, 100
DRAWN_S_MAX = 60.0
READY = re.compile(r"Baton  (healthy|degraded)  2(/\d+)? prefill  2(/\d+)? decode")
WORKERS = ("prefill-1", "prefill-2", "decode-1", "decode-2")


def ask(system: System) -> None:
    prompt = random.Random(77).choices(VOCABULARY, k=600)
    body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    answer = system.http.post("/v1/completions", json=body, headers={"x-baton-mode": "disaggregated"})
    assert answer.status_code == 200, answer.text


def test_a_frame_lists_all_workers(simulated: System):
    code, out, err = baton("top", "--once", "--state-dir", str(simulated.folder))

    assert (code, err) == (0, "")
    assert READY.match(out), out  # Another test may have put strangers beside them, who never become ready.
    for worker_id in WORKERS:
        assert f"● {worker_id}" in out


def test_the_report_covers_the_served_requests(simulated: System):
    for _ in range(REQUESTS):
        ask(simulated)

    def reported() -> dict | None:
        code, out, err = baton("report", "--json", "--model", "baton-tiny", "--state-dir", str(simulated.folder))
        assert code == 0, err
        rows = [one for one in json.loads(out)["buckets"] if one["tokens_min"] == 256]
        return rows[0] if rows and rows[0]["disaggregated"] >= REQUESTS else None

    row = until(reported, "the requests are in the report")
    assert row["ttft_s"] > 0
    assert row["worth"] in ("yes", "no", "unsure")
    assert row["reason"]


def test_top_draws_on_a_terminal_until_q_and_restores_it(simulated: System):
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    before = termios.tcgetattr(theirs)
    arguments = command("top", "--state-dir", str(simulated.folder))
    env = {name: value for name, value in environment().items() if name not in ("COLUMNS", "NO_COLOR")}
    env["TERM"] = "xterm-256color"
    process = subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    try:
        read_until(ours, *map(str.encode, WORKERS))
        assert termios.tcgetattr(theirs) != before
        os.write(ours, b"q")
        read_until(ours, b"\x1b[?1049l")
        assert process.wait(DRAWN_S_MAX) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def read_until(terminal: int, *wanted: bytes) -> None:
    """Until all of that has been drawn."""
    drawn, deadline = b"", time.monotonic() + DRAWN_S_MAX
    while not all(one in drawn for one in wanted):
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], drawn
        drawn += os.read(terminal, 65536)
