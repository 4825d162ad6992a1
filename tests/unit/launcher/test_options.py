"""What every command of ``baton`` says when there is nobody to ask."""

from __future__ import annotations

import pytest

from services.launcher.commands.options import no_nats
from shared.bus.port import BusDown

URL = "nats://router:secret@127.0.0.1:9"


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("no NATS at nats://127.0.0.1:9 within 5 s: refused", "NATS at nats://127.0.0.1:9 does not answer. `baton up`"),
        (
            "NATS at nats://127.0.0.1:9 asks who this is: name the key.",
            "asks who this is: name the key. `baton doctor`",
        ),
    ],
)
def test_a_nats_that_is_away_and_one_that_refuses_us_are_told_apart_without_the_password(
    why: str, words: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        no_nats(URL, BusDown(why))

    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert words in said
    assert "secret" not in said
