"""Which requests of browsers are refused: a page of another site must not use a server through its visitor's browser.

A browser sends requests wherever a page asks it to, also to servers that only its own machine can reach. It names the
page's site in ``Origin`` and ``Sec-Fetch-Site``, which no page can change. A site can also let its own name resolve to
this machine (DNS rebinding): then the browser takes the server for the page's own site, but names it in ``Host``. So a
server that trusts every client accepts only names that no stranger controls. Other clients than browsers send
neither ``Origin`` nor ``Sec-Fetch-Site``, and are not affected.

A browser shows a page the response of another site only if the response has headers that permit it, and asks first
with OPTIONS whether it may send the request at all (the Fetch standard calls that CORS and a preflight). Pages that the
operator names get these headers, whether or not a key is needed.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

from shared.http.errors import Header, HttpError, error_body

READ: Final = frozenset({b"host", b"origin", b"sec-fetch-site"})
OWN_SITE: Final = frozenset({b"same-origin", b"none"})
"""Values of ``Sec-Fetch-Site`` that show that the page is this server's own, or that the user typed the address."""
LOCAL_SUFFIXES: Final = (".localhost", ".internal")
"""Reserved: nobody can register a name below them."""
HOSTS_KEPT_MAX: Final = 256
"""Names that were found to be good, so that they are checked once."""


PREFLIGHT_S: Final = 600
"""How long a browser may remember the answer to a preflight, in seconds."""
PREFLIGHT_METHOD: Final = b"access-control-request-method"
PREFLIGHT_HEADERS: Final = b"access-control-request-headers"
HEADER_NAMES: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z, -]{1,2048}")


class AllowedPages:
    """The sites that an operator has named: their pages may use the server, and read its responses."""

    def __init__(self, hosts: str) -> None:
        """``hosts``: names of sites, each with or without a port, separated by commas."""
        self._named = {host.strip().lower() for host in hosts.split(",") if host.strip()}

    def named(self, host: bytes) -> bool:
        """Whether the operator named this ``host`` or ``host:port``, in lower case."""
        text = host.decode("latin-1")
        return bool(self._named) and (text in self._named or host_of(text) in self._named)

    def headers(self, origin: bytes) -> list[Header]:
        """The headers that let the page of ``origin`` read a response; none for a page that is not named."""
        if not self.named(origin.partition(b"://")[2].lower()):
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"*"),
            (b"vary", b"origin"),
        ]

    def preflight(self, headers: Iterable[Header]) -> list[Header]:
        """The headers of the answer to an OPTIONS request with ``headers``; none if it is no preflight of a named page.
        A preflight has no key, so that it is answered before keys are checked.
        """
        asked = {name: value for name, value in headers if name in (b"origin", PREFLIGHT_METHOD, PREFLIGHT_HEADERS)}
        allowed = self.headers(asked.get(b"origin", b""))
        if not allowed or PREFLIGHT_METHOD not in asked:
            return []
        names = asked.get(PREFLIGHT_HEADERS, b"")
        if HEADER_NAMES.fullmatch(names):
            allowed.append((b"access-control-allow-headers", names))
        allowed.append((b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"))
        allowed.append((b"access-control-max-age", b"%d" % PREFLIGHT_S))
        return allowed


class OriginPolicy:
    """Refuses requests that a page of another site has made; with ``checks_host`` also those under a foreign name."""

    def __init__(self, setting: str, pages: AllowedPages, *, checks_host: bool) -> None:
        """``pages``, from the variable ``setting``: sites whose pages may use this server, and further names of it."""
        self._pages = pages
        self._own = {"localhost", socket.gethostname().lower()}
        self._setting = setting
        self._checks_host = checks_host
        self._good: set[bytes] = set()

    def refusal(self, headers: Iterable[Header], *, navigates: bool = False) -> HttpError | None:
        """Why the request is refused; None when it is not. ``navigates``: it is a GET; a link of another site may lead
        here, because the other site cannot read the response.
        """
        host, origin, site = b"", b"", b""
        for name, value in headers:
            if name not in READ:
                continue
            if name == b"host":
                if self._checks_host and value not in self._good and not self._is_own(value):
                    return self._refused(f"This server is not known as {_shown(value)}.")
                host = value
            elif name == b"origin":
                origin = value
            else:
                site = value
        if not (origin or site):
            return None
        return self._refusal_of_page(host, origin, site, headers if navigates else ())

    def _refusal_of_page(
        self, host: bytes, origin: bytes, site: bytes, navigation: Iterable[Header]
    ) -> HttpError | None:
        asking = origin.partition(b"://")[2].lower()
        if origin and asking != host.lower() and not self._pages.named(asking):
            return self._refused(f"Pages of {_shown(origin)} may not use this server.")
        if site and site not in OWN_SITE and not (origin and self._pages.named(asking)):
            if (b"sec-fetch-mode", b"navigate") in navigation and (b"sec-fetch-dest", b"document") in navigation:
                return None
            return self._refused("Pages of another site may not use this server.")
        return None

    def _is_own(self, value: bytes) -> bool:
        """Whether a Host header has a name that only the operator can have given to this server. No DNS name is an
        address, and no public one is without a dot.
        """
        name = host_of(value.decode("latin-1"))
        own = name in self._own or "." not in name.rstrip(".") or name.endswith(LOCAL_SUFFIXES) or is_address(name)
        if not own and not self._pages.named(value.lower()):
            return False
        if len(self._good) < HOSTS_KEPT_MAX:
            self._good.add(value)
        return True

    def _refused(self, why: str) -> HttpError:
        message = f"{why} If it should be, set {self._setting} to its name."
        return HttpError(403, error_body(403, message, code="foreign_origin"), reason="foreign_origin")


def host_of(host: str) -> str:
    """The name of ``name:port`` or ``[::1]:port``, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return (host.rpartition(":")[0] if host.count(":") == 1 else host).lower()


def is_address(host: str) -> bool:
    """Whether that is an IP address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _shown(value: bytes) -> str:
    return value[:100].decode("latin-1")
