"""Addresses as texts: a name, an IPv4 or an IPv6 address, which URLs and host:port pairs have in brackets."""

from __future__ import annotations


def in_url(host: str) -> str:
    """An address as a URL has it."""
    return f"[{host}]" if ":" in host else host


def host_port(host: str, port: int) -> str:
    return f"{in_url(host)}:{port}"


def url_of(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{host_port(host, port)}"


def servers_of(url: str) -> list[str]:
    """The servers of a URL of NATS, which has commas between several: ``tls://a:4222,b:4222``. All have the scheme of
    the first; without one, it is ``nats``.
    """
    texts = [text.strip() for text in url.split(",") if text.strip()]
    scheme = texts[0].partition("://")[0] if texts and "://" in texts[0] else "nats"
    return [text if "://" in text else f"{scheme}://{text}" for text in texts]
