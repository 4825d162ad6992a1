"""Engines of other packages are known by their entry points."""

from __future__ import annotations

import sys
from importlib import invalidate_caches

import pytest

from services.worker.engines.plugged import GROUP, load_plugged, plugged_engines
from services.worker.settings import Settings
from shared.runtime.service import WrongConfiguration
from tests.support.other_stores import THIRD_PARTY


@pytest.fixture
def installed(monkeypatch):
    """A package beside Baton."""
    monkeypatch.syspath_prepend(str(THIRD_PARTY))
    invalidate_caches()
    yield
    sys.modules.pop("other_store", None)


def test_an_engine_that_nobody_announces_stops_the_worker_at_once():
    with pytest.raises(ValueError, match=f"WORKER_ENGINE: 'other' is no engine here; known: vllm, .*{GROUP}"):
        Settings(engine="other")


@pytest.mark.usefixtures("installed")
def test_an_announced_engine_is_loaded():
    assert Settings(engine="other").engine == "other"
    assert {"other", "other-broken"} <= set(plugged_engines())
    assert callable(load_plugged("other"))


@pytest.mark.usefixtures("installed")
def test_one_that_cannot_be_loaded_is_refused():
    with pytest.raises(
        WrongConfiguration, match="WORKER_ENGINE=other-broken: the entry point other_store:no_such_name"
    ):
        load_plugged("other-broken")
