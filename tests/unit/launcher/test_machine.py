"""The environment that child processes inherit."""

from __future__ import annotations

import pytest

from services.launcher.system.machine import inherited_environment


@pytest.mark.parametrize(("own", "given"), [(None, "keys.toml"), ("others.toml", "others.toml"), ("", "")])
def test_the_routers_keys_are_the_consoles_unless_it_has_its_own(tmp_path, monkeypatch, own, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.toml").touch()
    monkeypatch.setenv("ROUTER_KEYS_FILE", "keys.toml")
    monkeypatch.delenv("COLLECTOR_ADMIN_KEY_FILE", raising=False)
    if own is not None:
        monkeypatch.setenv("COLLECTOR_ADMIN_KEY_FILE", own)

    assert inherited_environment()["COLLECTOR_ADMIN_KEY_FILE"] == given


def test_a_missing_key_file_is_left_to_the_routers(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUTER_KEYS_FILE", str(tmp_path / "none.toml"))
    monkeypatch.delenv("COLLECTOR_ADMIN_KEY_FILE", raising=False)

    assert "COLLECTOR_ADMIN_KEY_FILE" not in inherited_environment()
