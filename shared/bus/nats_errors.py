"""Errors of a NATS connection as messages for the operator, with the correction."""

from __future__ import annotations

import logging
import re
import ssl
from urllib.parse import urlsplit

from shared.bus.nats_client import NotEncrypted
from shared.bus.nats_credentials import Access
from shared.bus.port import BusRefused

log = logging.getLogger("baton.bus")

ERRORS_LOGGED_MAX = 64
"""Distinct errors that one connection logs."""

LOGINS_MAX = 5
"""Refused logins of a first connection until the key counts as unknown: a nats-server that reads its configuration anew
also refuses clients whose login is under way.
"""

_VIOLATION = re.compile(r"permissions violation for (\w+) to \"([^\"]*)\"", re.IGNORECASE)
_NOT_YET_VALID, _EXPIRED = 9, 10
_NAMES_ANOTHER = (62, 64)
"""OpenSSL's numbers: the certificate is for another host name, or another address."""


class ConnectionErrors:
    """Logs each error of one connection once. One that a retry cannot fix ends the first connection attempt."""

    def __init__(self, url: str, access: Access) -> None:
        self.is_first_attempt = True
        """False once the connection is established, or cannot be."""
        self._url = url
        self._access = access
        self._logged: set[str] = set()
        self._refused_logins = 0

    def report(self, error: Exception) -> None:
        """Log an error of the connection. Raises BusRefused if a retry is useless."""
        why = refusal(error, self._url, self._access)
        if why and self.is_first_attempt:
            if _is_refused_login(error):
                self._refused_logins += 1
                if self._refused_logins < LOGINS_MAX:
                    return
            self.is_first_attempt = False
            raise BusRefused(why) from error
        text = why or violation(error)
        if not text:
            log.debug("NATS: %s", error)
        elif text not in self._logged and len(self._logged) < ERRORS_LOGGED_MAX:
            self._logged.add(text)
            log.error("%s", text)


def violation(error: Exception) -> str:
    """The message for a permissions violation; empty for other errors."""
    found = _VIOLATION.search(str(error))
    if found is None:
        return ""
    action = "publish" if found[1].lower() == "publish" else "subscribe"
    return (
        f"NATS: permissions violation: this process's key may not {action} to {found[2][:200]!r}. If it should, NATS "
        "has the permissions of another version: run `baton init` again and let nats-server reload them (SIGHUP)."
    )


def refusal(error: Exception, url: str, access: Access) -> str:
    """The message if the server and this process reject each other; empty if a retry may help."""
    shown = without_password(url)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"NATS at {shown}: {_untrusted_certificate(error, url, access)}"
    if isinstance(error, NotEncrypted):
        return (
            f"NATS at {shown} offers no encryption, but this process requires it (BATON_NATS_CA_FILE, tls://): "
            "nothing was sent. Let nats-server include the secure.conf that `baton init` made."
        )
    if _is_refused_login(error):
        return f"NATS at {shown} {_unknown_key(url, access)}"
    return ""


def _is_refused_login(error: Exception) -> bool:
    return "authorization violation" in str(error).lower()


def without_password(url: str) -> str:
    """The URL for logs and messages."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _untrusted_certificate(error: ssl.SSLCertVerificationError, url: str, access: Access) -> str:
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
            f"its certificate is not signed by the CA in {access.ca_file}. If this is the right server, "
            "BATON_NATS_CA_FILE must name the ca.pem that `baton init` made with its certificate."
        )
    return "its certificate is not trusted: BATON_NATS_CA_FILE must name the ca.pem that `baton init` made."


def _unknown_key(url: str, access: Access) -> str:
    if access.nkey_file:
        return (
            f"does not know the key in {access.nkey_file}. Keys and secure.conf are made together by `baton init`; "
            "has nats-server read this one (SIGHUP)?"
        )
    if urlsplit(url).username:
        return "rejects this user and password."
    return "requires a key: BATON_NATS_NKEY_FILE must name the key of this party, which `baton init` made."
