"""Why NATS will not have a process, or not hear it, in words that say what to do."""

from __future__ import annotations

import logging
import re
import ssl
from urllib.parse import urlsplit

from shared.bus.nats_client import NotEncrypted
from shared.bus.nats_credentials import Access
from shared.bus.port import BusDown

log = logging.getLogger("baton.bus")

SAID_MAX = 64
"""Different complaints of one connection that are logged."""

_VIOLATION = re.compile(r"permissions violation for (\w+) to \"([^\"]*)\"", re.IGNORECASE)
_NOT_YET_VALID, _EXPIRED = 9, 10
_NAMES_ANOTHER = (62, 64)
"""OpenSSL's numbers: the certificate is for another host name, or another address."""


class Complaints:
    """What goes wrong on one connection. Each is said once; what trying again cannot heal ends the first attempt."""

    def __init__(self, url: str, access: Access) -> None:
        self.is_first_attempt = True
        """Until the connection is there, or will never be."""
        self._url = url
        self._access = access
        self._said: set[str] = set()

    def hear(self, error: Exception) -> None:
        """An error of the connection. Raises BusDown if there is no use in trying again."""
        why = refusal(error, self._url, self._access)
        if why and self.is_first_attempt:
            self.is_first_attempt = False
            raise BusDown(why) from error
        words = why or violation(error)
        if not words:
            log.debug("NATS: %s", error)
        elif words not in self._said and len(self._said) < SAID_MAX:
            self._said.add(words)
            log.error("%s", words)


def violation(error: Exception) -> str:
    """The sentence about a subject that this process's key is not allowed to use; empty if the error is another."""
    found = _VIOLATION.search(str(error))
    if found is None:
        return ""
    deed = "speak" if found[1].lower() == "publish" else "listen"
    return (
        f"NATS: permissions violation: this process's key may not {deed} on {found[2][:200]!r}. If it should, NATS has "
        "the permissions of another version: run `baton init` again and have nats-server read them (SIGHUP)."
    )


def refusal(error: Exception, url: str, access: Access) -> str:
    """The sentence about a server that will not have us, or that we will not have; empty if trying again may help."""
    shown = without_password(url)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"NATS at {shown}: {_distrust(error, url, access)}"
    if isinstance(error, NotEncrypted):
        return (
            f"NATS at {shown} offers no encryption, and this process was told to use it (BATON_NATS_CA_FILE, tls://): "
            "nothing was said to it. Let nats-server include the secure.conf that `baton init` made."
        )
    if "authorization violation" in str(error).lower():
        return f"NATS at {shown} {_stranger(url, access)}"
    return ""


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _distrust(error: ssl.SSLCertVerificationError, url: str, access: Access) -> str:
    host = urlsplit(url).hostname
    if error.verify_code == _EXPIRED:
        return (
            "its certificate has expired, unless this machine's clock is wrong. Make another with `baton init --renew` "
            "and restart nats-server."
        )
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet: the clock of this machine, or of the one that made it, is wrong."
    if error.verify_code in _NAMES_ANOTHER:
        return f"its certificate is not for {host}: make one that is, with `baton init --renew --host {host}`."
    if access.ca_file:
        return (
            f"its certificate was not signed by the CA in {access.ca_file}. Is this the right server? If so, "
            "BATON_NATS_CA_FILE must name the ca.pem that `baton init` made together with its certificate."
        )
    return "its certificate is not known here: BATON_NATS_CA_FILE must name the ca.pem that `baton init` made."


def _stranger(url: str, access: Access) -> str:
    if access.nkey_file:
        return (
            f"does not know the key in {access.nkey_file}. Keys and secure.conf are made together by `baton init`; "
            "has nats-server read this one (SIGHUP)?"
        )
    if urlsplit(url).username:
        return "refuses that user with that password."
    return "asks who this is: BATON_NATS_NKEY_FILE must name the key of its party, which `baton init` made."
