"""`baton workers --watch` and `baton report` on a running system."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import select
import signal
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
WORKERS = ("prefill-1", "prefill-2", "decode-1", "decode-2")


def ask(system: System, number: int) -> None:
    """Disaggregated: a decode worker that has the prompt already would answer alone."""
    prompt = random.Random(f"report {number}").choices(VOCABULARY, k=600)
    body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    answer = system.http.post("/v1/completions", json=body, headers={"x-baton-mode": "disaggregated"})
    assert answer.status_code == 200, answer.text


def test_the_report_covers_the_served_requests(simulated: System):
    for number in range(REQUESTS):
        ask(simulated, number)

    def reported() -> dict | None:
        code, out, err = baton("report", "--json", "--model", "baton-tiny", "--state-dir", str(simulated.folder))
        assert code == 0, err
        rows = [one for one in json.loads(out)["buckets"] if one["tokens_min"] == 256]
        return rows[0] if rows and rows[0]["disaggregated"] >= REQUESTS else None

    row = until(reported, "the requests are in the report")
    assert row["ttft_s"] > 0
    assert row["worth"] in ("yes", "no", "unsure")
    assert row["reason"]


def test_the_watched_table_is_drawn_on_a_terminal_until_ctrl_c(simulated: System):
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    arguments = command("workers", "--watch", "--state-dir", str(simulated.folder))
    env = {name: value for name, value in environment().items() if name not in ("COLUMNS", "NO_COLOR")}
    env["TERM"] = "xterm-256color"
    process = subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    try:
        read_until(ours, *map(str.encode, WORKERS))
        read_until(ours, *map(str.encode, WORKERS))
        process.send_signal(signal.SIGINT)
        read_until(ours, b"\x1b[?1049l")
        assert process.wait(DRAWN_S_MAX) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_watching_without_a_terminal_is_refused(simulated: System):
    code, out, err = baton("workers", "--watch", "--state-dir", str(simulated.folder))

    assert code == 1
    assert "--watch draws on a terminal" in out + err


def read_until(terminal: int, *wanted: bytes) -> None:
    """Until all of that has been drawn."""
    drawn, deadline = b"", time.monotonic() + DRAWN_S_MAX
    while not all(one in drawn for one in wanted):
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], drawn
        drawn += os.read(terminal, 65536)
