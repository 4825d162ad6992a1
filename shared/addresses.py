"""Addresses as texts: a name, an IPv4 or an IPv6 address, which URLs and host:port pairs have in brackets."""

from __future__ import annotations


def in_url(host: str) -> str:
    """An address as a URL has it."""
    return f"[{host}]" if ":" in host else host


def host_port(host: str, port: int) -> str:
    return f"{in_url(host)}:{port}"


def url_of(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{host_port(host, port)}"
