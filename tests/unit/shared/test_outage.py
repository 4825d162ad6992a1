"""Work that is repeated while NATS is away says once that it fails."""

from __future__ import annotations

import logging

from shared.bus.outage import Outage
from shared.bus.port import AskTimedOut, Disconnected


def test_only_the_first_failure_is_logged_until_the_work_succeeds_again(caplog):
    outage = Outage(logging.getLogger("baton.test"))

    with caplog.at_level(logging.INFO, "baton"):
        for _ in range(3):
            outage.failed("cannot read", AskTimedOut())
        outage.over()
        outage.failed("cannot read", AskTimedOut("no reply"))

    assert caplog.messages == ["cannot read, trying again: AskTimedOut", "cannot read, trying again: no reply"]


def test_a_lost_connection_is_left_to_the_bus_and_hides_no_other_failure(caplog):
    outage = Outage(logging.getLogger("baton.test"))

    with caplog.at_level(logging.INFO, "baton"):
        outage.failed("cannot read", Disconnected("lost"))
        outage.failed("cannot read", AskTimedOut("no reply"))

    assert caplog.messages == ["cannot read, trying again: no reply"]
