"""A headless browser for page tests; errors and warnings in its console fail the test."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LAUNCH_S_MAX = 120.0
SEEN_S_MAX = 60.0
"""For an element to appear."""
ADMIN_KEY = "the-operator's-own-key"
DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The installed browser; skips without one."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)} (Debian: apt-get install chromium)")
    expect.set_options(timeout=SEEN_S_MAX * 1000)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=found, args=list(ARGUMENTS), chromium_sandbox=False, timeout=LAUNCH_S_MAX * 1000
        )
        with browser:
            yield browser


@pytest.fixture
def forgiven() -> list[str]:
    """Patterns of console messages that a test provokes."""
    return []


@pytest.fixture
def page(browser: Browser, forgiven: list[str]) -> Iterator[Page]:
    """A new tab. Any other console message fails the test at its end."""
    complaints: list[str] = []
    credentials = {"username": "operator", "password": ADMIN_KEY}
    with browser.new_context(
        viewport=DESKTOP, reduced_motion="reduce", color_scheme="light", http_credentials=credentials
    ) as context:
        context.set_default_timeout(SEEN_S_MAX * 1000)
        page = context.new_page()
        page.on("console", lambda said: _note(said, complaints))
        page.on("pageerror", lambda error: complaints.append(f"thrown: {error}"))
        yield page
    assert [one for one in complaints if not any(re.search(pattern, one) for pattern in forgiven)] == []


def _note(said: ConsoleMessage, complaints: list[str]) -> None:
    if said.type in ("error", "warning"):
        complaints.append(f"{said.type}: {said.text}")
