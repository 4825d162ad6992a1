"""Keys and CAs in files, and what is said when they are not what they should be."""

from __future__ import annotations

import asyncio
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from services.launcher.cluster.certificates import AUTHORITY_DAYS, SERVER_DAYS, KeyPair, new_authority, new_server
from shared.bus.nats_client import ERRORS_LOGGED_MAX, LOGINS_MAX, REFUSED_S_MAX, ConnectionErrors, refusal, violation
from shared.bus.nats_credentials import Access, credentials, new_seed, read_seed
from shared.bus.port import BusDown, BusRefused
from tests.support.virtual_time import in_virtual_time

NOW = datetime.now(UTC)
URL = "tls://nats.example.org:4222"


def handshake(authority: bytes, server: KeyPair, folder: Path, host: str = "nats.example.org") -> ssl.SSLError:
    """What a client that trusts this authority says of the server's certificate."""
    (folder / "server.pem").write_bytes(server.certificate + server.key)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "server.pem")
    trusting = ssl.create_default_context(cadata=authority.decode())
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(down, up, server_hostname=host)
    peer = serving.wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for side in (client, peer):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return error
    raise AssertionError("they trust each other")


def test_a_certificate_of_the_cluster_is_trusted_for_its_names_and_addresses(tmp_path):
    authority = new_authority(("nats.example.org", "10.0.0.7"), NOW)
    server = new_server(authority, ("nats.example.org", "10.0.0.7"), NOW)

    for host in ("nats.example.org", "10.0.0.7"):
        with pytest.raises(AssertionError, match="they trust each other"):
            handshake(authority.certificate, server, tmp_path, host)


@pytest.mark.parametrize("foreign", ["bank.example.com", "192.0.2.1"])
def test_the_ca_of_a_cluster_is_trusted_for_no_other_name_or_address(tmp_path, foreign):
    authority = new_authority(("nats.example.org", "10.0.0.7"), NOW)

    error = handshake(authority.certificate, new_server(authority, (foreign,), NOW), tmp_path, foreign)

    assert "permitted subtree violation" in str(error)


@pytest.mark.parametrize(
    ("made_days_ago", "hosts", "ca_file", "says"),
    [
        (SERVER_DAYS + 1, ("nats.example.org",), "ca.pem", "has expired.*baton init --renew"),
        (-2, ("nats.example.org",), "ca.pem", "not valid yet.*clock"),
        (0, ("elsewhere",), "ca.pem", r"not for nats\.example\.org.*--host nats\.example\.org"),
    ],
    ids=["expired", "not-yet-valid", "another-name"],
)
def test_an_invalid_certificate_error_says_what_to_do(tmp_path, made_days_ago, hosts, ca_file, says):
    made = NOW - timedelta(days=made_days_ago)
    authority = new_authority(hosts, min(NOW, made))
    error = handshake(authority.certificate, new_server(authority, hosts, made), tmp_path)

    assert made_days_ago < AUTHORITY_DAYS
    with pytest.raises(BusDown, match=says):
        ConnectionErrors(URL, Access(ca_file=ca_file)).report(error)


async def test_connection_errors_are_logged_up_to_a_limit(caplog):
    errors = ConnectionErrors(URL, Access(nkey_file="k"))
    errors.is_first_attempt = False

    for number in range(3 * ERRORS_LOGGED_MAX):
        errors.report(Exception(f'nats: permissions violation for publish to "s.{number}"'))
        errors.report(Exception("nats: 'Authorization Violation'"))

    assert len(caplog.records) == ERRORS_LOGGED_MAX


def test_a_login_that_a_reload_of_the_server_interrupts_is_repeated():
    errors = ConnectionErrors(URL, Access(nkey_file="k"))

    for _ in range(LOGINS_MAX - 1):
        errors.report(Exception("nats: 'Authorization Violation'"))
    with pytest.raises(BusRefused, match="does not know the key in k"):
        errors.report(Exception("nats: 'Authorization Violation'"))


@pytest.mark.parametrize("error", [OSError("refused"), TimeoutError(), Exception("nats: maximum connections exceeded")])
def test_what_trying_again_may_heal_is_no_refusal(error):
    assert refusal(error, URL, Access()) == violation(error) == ""


def test_a_name_without_an_address_is_reported_once_in_each_outage_and_ends_no_first_attempt(caplog):
    errors = ConnectionErrors("nats://router:secret@nats.example:4222", Access())
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    for _ in range(2):
        errors.report(unknown)
        errors.report(unknown)
        errors.connected()

    assert len(caplog.messages) == 2
    assert "the name nats.example cannot be resolved (Name or service not known)" in caplog.messages[0]
    assert "secret" not in caplog.messages[0]


def test_a_refused_password_is_not_shown():
    said = refusal(Exception("'Authorization Violation'"), "nats://router:secret@n:1", Access())

    assert "secret" not in said
    assert "nats://n:1" in said


def test_a_key_is_read_with_its_owner_and_never_shown(tmp_path):
    made = new_seed("worker.gpu-1")
    (tmp_path / "nkey").write_text(made.file_text)

    read = read_seed(tmp_path / "nkey")

    assert read == made
    assert read.public_key.startswith("U")
    assert made.text not in repr(made)
    assert new_seed("router").text != new_seed("router").text


def test_a_key_made_elsewhere_will_do(tmp_path):
    (tmp_path / "nkey").write_text(f"{new_seed('').text}\n")

    login = credentials("nats://n:1", Access(party="worker", nkey_file=str(tmp_path / "nkey")))

    assert login.inboxes == "_INBOX.worker"


@pytest.mark.parametrize("text", ["", "SUNONSENSE\n", "two\nlines\n", "-----BEGIN CERTIFICATE-----"])
def test_a_file_that_holds_no_key_is_named(tmp_path, text):
    (tmp_path / "nkey").write_text(text)

    with pytest.raises(BusDown, match="nkey holds no nkey seed"):
        read_seed(tmp_path / "nkey")


def test_a_file_that_is_not_there_is_named(tmp_path):
    for access in (Access(nkey_file=str(tmp_path / "none")), Access(ca_file=str(tmp_path / "none"))):
        with pytest.raises(BusDown, match="none: No such file"):
            credentials("nats://n:1", access)


def test_a_ca_file_without_a_certificate_is_named(tmp_path):
    (tmp_path / "ca.pem").write_text("nothing")

    with pytest.raises(BusDown, match=r"ca\.pem holds no CA certificate"):
        credentials("nats://n:1", Access(ca_file=str(tmp_path / "ca.pem")))


@pytest.mark.parametrize(
    ("url", "inboxes"),
    [("nats://n:1", "_INBOX"), ("nats://router:p@n:1", "_INBOX.router"), ("nats://a%20b@n:1", "_INBOX")],
)
def test_without_a_key_the_inbox_prefix_is_that_of_the_urls_user(url, inboxes):
    assert credentials(url, Access(party="router")).inboxes == inboxes


@in_virtual_time
async def test_a_key_that_stays_refused_after_the_connection_was_lost_is_given_up():
    errors = ConnectionErrors(URL, Access(nkey_file="k"))
    errors.is_first_attempt = False
    refused = Exception("nats: 'Authorization Violation'")

    for _ in range(2):  # NATS is given other keys, and has this one again in time.
        errors.report(refused)
        await asyncio.sleep(0.9 * REFUSED_S_MAX)
        errors.report(refused)
        errors.connected()
    errors.report(refused)
    await asyncio.sleep(1.1 * REFUSED_S_MAX)
    with pytest.raises(BusRefused, match="does not know the key in k"):
        errors.report(refused)
