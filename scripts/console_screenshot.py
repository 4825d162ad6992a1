"""Takes docs/images/console.png: starts simulated engines, sends some traffic, and opens the console in chromium.

python scripts/console_screenshot.py [FILE]
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from playwright.sync_api import sync_playwright

PORT, COLLECTOR_PORT, NATS_PORT = 18400, 18401, 18402
ROOT = Path(__file__).parents[1]
START_S_MAX = 120.0
TRAFFIC_S = 15.0
CLIENTS = 6
NEW_SHARE = 0.6
"""Of the prompts: their KV moves from prefill to decode workers; the others are cached."""
SIZE = {"width": 1400, "height": 900}


def send(number: int) -> None:
    chance = random.Random(number)
    document = number if chance.random() < NEW_SHARE else number % 5
    prompt = f"Document {document}. " * chance.randint(40, 300) + f"Question {number}?"
    body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": chance.randint(8, 60), "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()


def wait_ready(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S_MAX
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{COLLECTOR_PORT}/ready", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("The system did not start")


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images/console.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        ports = ["--port", str(PORT), "--collector-port", str(COLLECTOR_PORT), "--nats-port", str(NATS_PORT)]
        command = [sys.executable, "-m", "services.launcher", "up", "--engine", "simulated", "--prefill", "2"]
        command += ["--decode", "2", *ports, "--state-dir", folder]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            wait_ready(process)
            with ThreadPoolExecutor(CLIENTS) as clients, sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                page = browser.new_page(viewport=SIZE, color_scheme="light")
                page.goto(f"http://127.0.0.1:{COLLECTOR_PORT}/console")
                page.get_by_text("4 of 4").wait_for(timeout=START_S_MAX * 1000)
                end, number = time.monotonic() + TRAFFIC_S, 0
                while time.monotonic() < end:
                    list(clients.map(send, range(number + 1, number + CLIENTS + 1)))
                    number += CLIENTS
                page.screenshot(path=file)
                browser.close()
        finally:
            process.terminate()
            process.wait()


main()
