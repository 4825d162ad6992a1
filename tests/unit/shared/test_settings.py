"""Settings from variables."""

from __future__ import annotations

import os
from typing import Literal

import msgspec
import pytest

from shared.runtime.settings import CommonSettings, SettingsError, load, load_common, why_unusable


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Like a service's."""

    worker_id: str
    port: int = 8000
    silence_s_max: float = 3.0
    verbose: bool = False
    format: Literal["text", "json"] = "text"


def test_variables_become_fields_of_their_types():
    environ = {"X_WORKER_ID": "w1", "X_PORT": "9000", "X_SILENCE_S_MAX": "1.5", "X_VERBOSE": "true", "HOME": "/x"}

    assert load(Settings, "X_", environ) == Settings(worker_id="w1", port=9000, silence_s_max=1.5, verbose=True)


def test_an_empty_variable_counts_as_not_set():
    assert load(Settings, "X_", {"X_WORKER_ID": "w1", "X_PORT": ""}).port == 8000


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"X_WORKER_ID": "w1", "X_PROT": "1"}, "X_PROT is not a setting; did you mean X_PORT?"),
        ({"X_WORKER_ID": "w1", "X_ZZZ": "1"}, "known: X_WORKER_ID, X_PORT"),
        ({}, "X_WORKER_ID is not set and has no default"),
        ({"X_WORKER_ID": "w1", "X_PORT": "http"}, "X_PORT='http': Expected `int`"),
        (
            {"X_WORKER_ID": "w1", "X_FORMAT": "xml"},
            "X_FORMAT='xml': Invalid enum value 'xml'; write text, json, or unset",
        ),
    ],
)
def test_a_wrong_variable_stops_the_process_and_is_named(environ, says):
    with pytest.raises(SettingsError, match=says.replace("?", r"\?")):
        load(Settings, "X_", environ)


def test_what_all_processes_share_has_defaults_and_checks():
    common = load_common({"BATON_NATS_URL": "nats://n:1", "BATON_LOG_FORMAT": "json"})

    assert (common.nats_url, common.log_format, common.otlp_endpoint) == ("nats://n:1", "json", "")
    with pytest.raises(SettingsError, match="BATON_LOG_FORMAT='xml'"):
        load_common({"BATON_LOG_FORMAT": "xml"})


def test_state_and_cache_follow_xdg(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")

    assert (CommonSettings().state_dir, CommonSettings().cache_dir) == ("/s/baton", "/c/baton")


def test_a_file_of_another_user_is_said_with_its_remedy():
    assert f"chown {os.getuid()} FILE" in why_unusable(PermissionError(13, "Permission denied", "/etc/baton/keys.toml"))
    assert why_unusable(ValueError("it is not TOML")) == "it is not TOML"
