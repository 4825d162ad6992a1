"""Connections that NATS refuses, and their errors: unknown keys, no TLS, the wrong server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import shutil
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from services.launcher.cluster.files import create
from services.launcher.cluster.folder import InitRequest
from shared.bus.nats_bus import connect_nats
from shared.bus.nats_credentials import Access, new_seed
from shared.bus.port import BusDown, BusRefused
from shared.contracts.channels import KV_EVENTS, Party
from tests.integration.bus.worlds import until
from tests.support.builders import kv_batch
from tests.support.cluster_keys import ClusterKeys

pytestmark = pytest.mark.nats

SOON_S = 60.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return ClusterKeys(tmp_path_factory.mktemp("keys"))


async def refusal(url: str, access: Access) -> str:
    with pytest.raises(BusDown) as refused:
        await connect_nats(url, name="stranger", connect_s_max=SOON_S, access=access)
    return str(refused.value)


async def test_an_unknown_key_is_refused_with_the_name_of_its_file(guarded, keys, tmp_path):
    stranger = tmp_path / "nkey"
    stranger.write_text(new_seed("router").file_text)
    access = dataclasses.replace(keys.access(Party.ROUTER), nkey_file=str(stranger))

    assert f"does not know the key in {stranger}" in await refusal(guarded.url, access)


async def test_without_a_key_the_error_names_the_setting(guarded, keys):
    access = dataclasses.replace(keys.access(Party.ROUTER), nkey_file="")

    assert "BATON_NATS_NKEY_FILE" in await refusal(guarded.url, access)


async def test_a_certificate_of_another_ca_is_rejected(guarded, keys, tmp_path):
    other = ClusterKeys(tmp_path)
    access = dataclasses.replace(keys.access(Party.ROUTER), ca_file=other.access(Party.ROUTER).ca_file)

    assert f"is not signed by the CA in {access.ca_file}" in await refusal(guarded.url, access)


async def test_without_a_ca_the_servers_certificate_is_rejected(guarded, keys):
    access = dataclasses.replace(keys.access(Party.ROUTER), ca_file="")

    assert "BATON_NATS_CA_FILE" in await refusal(guarded.url, access)


async def test_a_server_without_tls_is_refused(nats_server, keys):
    said = await refusal(nats_server.url, keys.access(Party.ROUTER))

    assert "offers no encryption" in said


async def test_a_renewed_certificate_is_in_use_after_sighup_and_its_end_is_known(keys, tmp_path):
    renewed_at = datetime.now(UTC) + timedelta(minutes=30)
    with keys.server(tmp_path) as server:
        async with asyncio.timeout(SOON_S):
            before = await connect_nats(server.url, name="collector", access=keys.access(Party.COLLECTOR))
            renewed = create(keys.folder, InitRequest(api_key=False, renew=True), renewed_at)
            os.kill(server.pid, signal.SIGHUP)
            after = await connect_nats(server.url, name="collector", access=keys.access(Party.COLLECTOR))
            while after.counts.certificate_ends_at == before.counts.certificate_ends_at:
                await after.close()
                after = await connect_nats(server.url, name="collector", access=keys.access(Party.COLLECTOR))
            await after.close()
            await before.close()

    assert after.counts.certificate_ends_at == int(renewed.server.ends_at.timestamp())


async def test_a_client_that_speaks_in_clear_is_cut_off(guarded):
    async with asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", guarded.port)
        info = json.loads((await reader.readline()).removeprefix(b"INFO "))
        writer.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
        try:
            answer = await reader.read()
        except ConnectionError:
            answer = b""
        writer.close()

    assert info["tls_required"]
    assert b"PONG" not in answer


async def test_a_permission_violation_is_logged_once_with_its_subject(guarded, keys, caplog):
    async with asyncio.timeout(SOON_S):
        bus = await connect_nats(guarded.url, name="router", access=keys.access(Party.ROUTER))
        for _ in range(5):
            await bus._sender.send("worker.w1.drain", b"", None, "")
        await bus.flush(SOON_S)
        await bus.close()

    told = [record.message for record in caplog.records if "permissions violation" in record.message]
    assert len(told) == 1
    assert "may not publish to 'worker.w1.drain'" in told[0]


async def test_a_process_comes_back_over_tls_when_nats_was_restarted(keys, tmp_path):
    got = []
    with keys.server(tmp_path) as server:
        async with asyncio.timeout(SOON_S):
            worker = await connect_nats(server.url, name="worker", access=keys.access(Party.WORKER))
            router = await connect_nats(server.url, name="router", access=keys.access(Party.ROUTER))
            await router.subscribe(KV_EVENTS, lambda batch, _: got.append(batch.seq))

            server.kill()
            await until(lambda: not worker.connected and not router.connected, SOON_S)
            server.start()
            await until(lambda: worker.counts.reconnects and router.counts.reconnects, SOON_S)
            await router.flush(SOON_S)
            await worker.publish(KV_EVENTS, kv_batch(1))
            await until(lambda: got, SOON_S)

            await worker.close()
            await router.close()
    assert got == [1]


@pytest.mark.slow
async def test_a_worker_whose_key_is_revoked_stops_and_says_why_once(tmp_path, caplog):
    keys = ClusterKeys(tmp_path / "keys", "w1")
    folder = tmp_path / "nats"
    folder.mkdir()
    with keys.server(folder) as server:
        access = keys.access("worker.w1")
        bus = await connect_nats(server.url, name="worker", connect_s_max=SOON_S, access=access)
        shutil.rmtree(Path(access.nkey_file).parent)
        create(keys.folder, InitRequest(api_key=False), datetime.now(UTC))
        (folder / "secure.conf").write_text((keys.folder / "nats" / "secure.conf").read_text())
        with caplog.at_level(logging.INFO, "baton"):
            os.kill(server.pid, signal.SIGHUP)
            async with asyncio.timeout(2 * SOON_S):
                with pytest.raises(BusRefused, match="does not know the key"):
                    await asyncio.shield(bus.failed)
        await bus.close()

    assert [text.partition(":")[0] for text in caplog.messages] == ["the connection to NATS was lost", "NATS at tls"]
