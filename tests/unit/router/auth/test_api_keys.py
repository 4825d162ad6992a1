"""Authentication over real sockets and in virtual time: keys, errors, limits, and what reaches a worker."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path

import httpx
import msgspec
import pytest

from services.router.auth.api_keys import salt_of
from services.router.auth.authenticator import Authenticator
from services.router.auth.key_file import keyring_of, salt_secret_of
from services.router.decisions.decision_filter import DecisionFilter
from services.router.settings import Settings
from services.router.usage import Budgets, UnstoredUsage
from shared.contracts.api_keys import digest_of
from shared.contracts.failures import Reason
from shared.runtime.clock import SystemClock
from shared.runtime.settings import FollowedFile, SettingsError, state_of
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.unit.router.http.test_http_server import running, until
from tests.unit.router.streams import ANSWER, fails, falls_silent, streams
from tests.unit.router.world import COMPLETIONS, World, give_legs, in_world, prompt, run_in_world

ACME, RIVAL, OPERATOR, LIMITED, PUBLIC = "key-acme", "key-rival", "key-operator", "key-limited", "key-public"


def entry(key: str, tenant: str, more: str = "") -> str:
    return f'[[key]]\ntenant = "{tenant}"\nsha256 = "{digest_of(key)}"\n{more}\n'


TOP = 'salt = "0123456789abcdef0123456789abcdef"\n'
KEYS = TOP + "".join([
    entry(ACME, "acme"),
    entry(RIVAL, "rival"),
    entry(OPERATOR, "ops", 'permissions = ["admin"]'),
    entry(LIMITED, "small", "requests_per_minute = 2"),
    entry(PUBLIC, "open", "public_cache = true"),
])  # fmt: skip
SALTS = salt_secret_of(Settings(keys=KEYS), keyring_of(Settings(keys=KEYS)))


def budgets() -> Budgets:
    return Budgets(MemoryBus(MemoryHub()), SystemClock(), UnstoredUsage(), lambda: None)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


NO_KEY_OF_ANYBODY = [
    {},
    bearer("wrong"),
    {"authorization": "Bearer"},
    bearer(ACME[:-1]),
    bearer("x" * 10_000),
    {"authorization": ACME},
    {"authorization": f"Basic {ACME}"},
    {**bearer(ACME), "x-api-key": RIVAL},
    {"authorization": f"Bearer {digest_of(ACME)}"},
]
KEY_OF_SOMEBODY = [
    bearer(ACME),
    {"authorization": f"bearer  {ACME}"},
    {"x-api-key": ACME},
    {**bearer(ACME), "x-api-key": ACME},
    {"api-key": ACME},
    {**bearer("sk-of-another-service"), "x-api-key": ACME},
    {"authorization": "Basic b3RoZXI6c2VydmljZQ==", "api-key": ACME},
]


async def test_a_missing_key_gets_401_before_the_body_is_read():
    async with running(keys=KEYS) as up, httpx.AsyncClient(base_url=up.url) as client:
        for headers in NO_KEY_OF_ANYBODY:
            asked = await client.post(COMPLETIONS, json=prompt(), headers=headers)
            for response in (asked, await client.get("/v1/models", headers=headers)):
                assert response.status_code == 401, headers
                assert response.headers["www-authenticate"].startswith("Bearer")
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert up.worker.started == []


async def test_keys_of_two_clients_in_one_request_get_401_that_says_so():
    async with running(keys=KEYS) as up, httpx.AsyncClient(base_url=up.url) as client:
        for path, method in ((COMPLETIONS, "POST"), ("/v1/models", "GET")):
            both = {**bearer(ACME), "x-api-key": RIVAL}
            response = await client.request(method, path, json=prompt(), headers=both)
            assert response.status_code == 401
            assert "two clients" in response.json()["error"]["message"]


async def test_a_valid_key_is_served_and_never_reaches_a_worker():
    async with running(keys=KEYS) as up, httpx.AsyncClient(base_url=up.url) as client:
        for headers in KEY_OF_SOMEBODY:
            assert (await client.post(COMPLETIONS, json=prompt(), headers=headers)).status_code == 200, headers

        assert len(up.worker.started) == len(KEY_OF_SOMEBODY)
        received = b"".join(msgspec.msgpack.encode(start) for start in up.worker.started)
        assert ACME.encode() not in received + json.dumps(up.worker.headers).encode()


async def test_only_health_routes_need_no_key():
    async with running(keys=KEYS, metrics="admin") as up, httpx.AsyncClient(base_url=up.url) as client:
        seen = {path: (await client.get(path)).status_code for path in ("/", "/health", "/ready", "/ping")}
        assert set(seen.values()) == {200}
        hidden = [
            "/metrics",
            "/openapi.json",
            "/version",
            "/v1/models",
            "/baton/decisions",
            "/baton/decisions/latest",
            "/nothing",
            "/v1//completions",
        ]
        hidden.append("/v1/%63ompletions")
        assert {(await client.get(path)).status_code for path in hidden} == {401}

        clerk = [(await client.get(path, headers=bearer(ACME))).status_code for path in ("/metrics", "/v1/models")]
        operator = [
            (await client.get(path, headers=bearer(OPERATOR))).status_code for path in ("/metrics", "/v1/models")
        ]
        assert (clerk, operator) == ([403, 200], [200, 200])


async def test_metrics_need_no_key_on_loopback():
    async with running(keys=KEYS) as up, httpx.AsyncClient() as client:
        assert (await client.get(up.url + "/metrics")).status_code == 200


async def test_a_key_without_inference_permission_gets_403():
    async with running(keys=KEYS) as up, httpx.AsyncClient(headers=bearer(OPERATOR)) as client:
        response = await client.post(up.url + COMPLETIONS, json=prompt())

        assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
        assert up.worker.started == []


async def test_a_key_over_its_limit_gets_429_with_retry_after():
    async with running(keys=KEYS) as up, httpx.AsyncClient(headers=bearer(LIMITED)) as client:
        responses = [await client.post(up.url + COMPLETIONS, json=prompt()) for _ in range(3)]

        assert [response.status_code for response in responses] == [200, 200, 429]
        refused = responses[-1]
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert (refused.headers["x-ratelimit-limit-requests"], refused.headers["x-ratelimit-remaining-requests"]) == (
            "2",
            "0",
        )
        assert (await client.post(up.url + COMPLETIONS, json=prompt(), headers=bearer(ACME))).status_code == 200


@pytest.mark.parametrize(("permission", "status"), [("infer", 403), ("view", 200), ("admin", 200)])
async def test_metrics_need_view_or_admin_where_others_can_connect(permission, status):
    keys = TOP + entry(ACME, "acme", f'permissions = ["{permission}"]')
    async with running(keys=keys, published_host="192.0.2.1") as up, httpx.AsyncClient(base_url=up.url) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=bearer(ACME))).status_code == status


async def test_a_key_may_ask_for_decisions_only_so_often():
    async with running(keys=KEYS) as up, httpx.AsyncClient(base_url=up.url) as client:
        up.router.authenticator.client([(b"x-api-key", ACME.encode())]).questions.take(SystemClock().now(), 239)

        async def until_refused(path: str) -> httpx.Response:
            """The bucket fills again meanwhile, by less than what is taken from it."""
            for _ in range(100):
                answer = await client.get(path, headers=bearer(ACME))
                if answer.status_code == 429:
                    break
            return answer

        assert (await client.get("/baton/decisions", headers=bearer(ACME))).status_code == 200
        refused = await until_refused("/baton/decisions")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert (await until_refused("/baton/decisions/latest")).status_code == 429
        assert (await client.get("/baton/decisions", headers=bearer(RIVAL))).status_code == 200


async def test_tenants_see_their_own_decisions_and_operators_see_all():
    async with running(keys=KEYS) as up, httpx.AsyncClient(base_url=up.url) as client:
        mine = (await client.post(COMPLETIONS, json=prompt(), headers=bearer(ACME))).headers["x-baton-decision"]
        await client.post(COMPLETIONS, json=prompt(), headers={**bearer(RIVAL), "x-request-id": "rivals"})

        async def seen(key: str, path: str) -> int:
            return (await client.get(path, headers=bearer(key))).status_code

        assert [await seen(key, f"/baton/decisions/{mine}") for key in (ACME, RIVAL, OPERATOR)] == [200, 404, 200]
        unknown = f"{up.router.router_id}-d{1:032x}"
        foreign, missing = [
            (await client.get(f"/baton/decisions/{one}", headers=bearer(RIVAL))).json() for one in (mine, unknown)
        ]
        assert json.dumps(foreign).replace(mine, unknown) == json.dumps(missing)
        newest = {
            key: (await client.get("/baton/decisions/latest", headers=bearer(key))).json().get("tenant")
            for key in (ACME, RIVAL, OPERATOR, LIMITED)
        }
        assert newest == {ACME: "acme", RIVAL: "rival", OPERATOR: "rival", LIMITED: None}
        listed = {
            key: [
                one["tenant"] for one in (await client.get("/baton/decisions", headers=bearer(key))).json()["decisions"]
            ]
            for key in (ACME, RIVAL, OPERATOR)
        }
        assert listed == {ACME: ["acme"], RIVAL: ["rival"], OPERATOR: ["rival", "acme"]}
        found = await client.get("/baton/decisions", params={"request_id": "rivals"}, headers=bearer(ACME))
        assert found.json()["decisions"] == []


async def test_changed_key_files_are_reloaded_and_broken_ones_ignored(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    file = tmp_path / "keys.toml"
    file.write_text(TOP + entry(ACME, "acme"))
    authenticator = Authenticator(Settings(keys_file=str(file)), SystemClock().now, budgets())
    following = asyncio.ensure_future(authenticator.follow(check_s=0.01))

    def lets_in(key: str) -> bool:
        return authenticator.client([(b"authorization", f"Bearer {key}".encode())]) is not None

    assert (lets_in(ACME), lets_in(RIVAL)) == (True, False)
    file.write_text(TOP + entry(RIVAL, "rival"))
    await until(lambda: lets_in(RIVAL))
    assert not lets_in(ACME)

    file.write_text("[[key]]\nhalf of a f")
    await until(lambda: "are unchanged" in caplog.text)
    assert lets_in(RIVAL)
    assert "[[key]]" not in authenticator.failure
    assert str(file) in authenticator.failure
    file.unlink()
    await until(lambda: "No such file" in caplog.text)
    assert lets_in(RIVAL)
    assert {record.levelname for record in caplog.records} == {"ERROR"}
    assert RIVAL not in caplog.text
    following.cancel()


async def test_revocation_is_seen_however_the_file_is_replaced(tmp_path):
    """By a rename, through a folder that is exchanged as a whole, and after a time in which it could not be read."""
    mounted, link = tmp_path / "one", tmp_path / "mounted"
    mounted.mkdir()
    link.symlink_to(mounted)
    file = link / "keys.toml"
    file.write_text(TOP + entry(ACME, "acme") + entry(RIVAL, "rival"))
    authenticator = Authenticator(Settings(keys_file=str(file)), SystemClock().now, budgets())
    following = asyncio.ensure_future(authenticator.follow(check_s=0.01))

    def tenants() -> set[str]:
        named = (authenticator.client([(b"x-api-key", key.encode())]) for key in (ACME, RIVAL, OPERATOR))
        return {client.key.tenant for client in named if client is not None}

    assert tenants() == {"acme", "rival"}
    (tmp_path / "new").write_text(TOP + entry(RIVAL, "rival"))
    (tmp_path / "new").replace(file)
    await until(lambda: tenants() == {"rival"})

    other = tmp_path / "two"
    other.mkdir()
    (other / "keys.toml").write_text(TOP + entry(ACME, "acme"))
    (tmp_path / "link").symlink_to(other)
    (tmp_path / "link").replace(link)
    await until(lambda: tenants() == {"acme"})

    (other / "keys.toml").replace(other / "away")  # As a file that this user may not read, also for root.
    await until(lambda: "No such file" in authenticator.failure)
    stat = (other / "away").stat()
    (other / "away").write_text(TOP + entry(OPERATOR, "ops"))
    os.utime(other / "away", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (other / "away").replace(other / "keys.toml")
    await until(lambda: tenants() == {"ops"})
    assert authenticator.failure == ""
    following.cancel()


async def test_a_file_that_is_made_readable_later_is_read_although_its_content_is_old(tmp_path):
    """chmod changes neither time of modification nor size: what could not be read is tried again at each look."""
    file = tmp_path / "keys.toml"
    file.write_text(TOP + entry(ACME, "acme"))
    followed = FollowedFile(str(file), lambda: readable(file), what="keys", log=logging.getLogger("test"))
    values = []
    following = asyncio.ensure_future(followed.follow(values.append, check_s=0.01))

    file.write_text("unreadable")
    await until(lambda: followed.failure)
    state, mode = state_of(str(file)), file.stat().st_mode
    file.chmod(0o640 if mode & 0o777 != 0o640 else 0o600)
    assert state_of(str(file)) != state
    UNREADABLE.clear()
    await until(lambda: values == ["unreadable"])
    assert followed.failure == ""
    following.cancel()


UNREADABLE = {"unreadable"}


def readable(file: Path) -> str:
    if (text := file.read_text()) in UNREADABLE:
        raise SettingsError("Permission denied")
    return text


async def test_running_streams_of_a_revoked_key_end_with_an_error_event_and_others_go_on(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(TOP + entry(ACME, "acme") + entry(RIVAL, "rival"))
    async with running(keys_file=str(file)) as up, httpx.AsyncClient(base_url=up.url, timeout=10.0) as client:
        up.worker.script = streams(2, falls_silent)
        following = asyncio.ensure_future(up.router.authenticator.follow(check_s=0.01))

        async def stream_of(key: str) -> bytes:
            received = b""
            body = prompt(stream=True)
            async with client.stream("POST", COMPLETIONS, json=body, headers=bearer(key)) as response:
                async for piece in response.aiter_bytes():
                    received += piece
            return received

        revoked, other = asyncio.ensure_future(stream_of(ACME)), asyncio.ensure_future(stream_of(RIVAL))
        await until(lambda: sum(context.answering for context in up.router.relay.in_flight) == 2)
        file.write_text(TOP + entry(ACME, "acme", "requests_per_minute = 9") + entry(RIVAL, "rival"))
        acme = [(b"x-api-key", ACME.encode())]
        await until(lambda: up.router.authenticator.client(acme).key.requests_per_minute == 9)  # It keeps its streams.
        (tmp_path / "new").write_text(TOP + entry(RIVAL, "rival"))
        (tmp_path / "new").replace(file)

        ended = await asyncio.wait_for(revoked, 5.0)
        assert ended.startswith(b"data: ")
        assert json.loads(ended.split(b"data: ")[-1])["error"]["message"] == "The request's API key was revoked."
        assert not other.done()
        refused = await client.post(COMPLETIONS, json=prompt(), headers=bearer(ACME))
        assert refused.status_code == 401
        other.cancel()
        following.cancel()


@in_world(keys=KEYS)
async def test_a_queued_request_of_a_revoked_key_is_not_served(world: World):
    connection, asking = world.begin(json.dumps(prompt()).encode(), **bearer(ACME))
    await asyncio.sleep(0.1)
    connection.http_request.head.client.is_revoked = True
    await world.worker("w1")
    await asyncio.sleep(10.0)

    assert asking.done()
    assert b" 200 " not in connection.written.partition(b"\r\n")[0]


def test_prompt_and_completion_tokens_are_charged_and_refill():
    keys = TOP + entry(LIMITED, "small", "tokens_per_minute = 12")

    async def scenario(world: World) -> None:
        await world.worker("w1")
        first = await world.ask(prompt(), **bearer(LIMITED))  # 9 tokens of prompt and 3 of completion
        second = await world.ask(prompt(), **bearer(LIMITED))
        assert first.status == 200
        assert (second.status, second.error["type"]) == (429, "tokens")
        await asyncio.sleep(float(second.headers["retry-after"]))
        assert (await world.ask(prompt(), **bearer(LIMITED))).status == 200

    run_in_world(scenario, keys=keys)


@in_world(keys=KEYS)
async def test_the_key_decides_the_tenant_not_the_header(world: World):
    await world.worker("w1")
    await world.ask(prompt(), x_baton_tenant="rival", **bearer(ACME))
    await world.ask(prompt(), x_baton_tenant="not a tenant!", **bearer(ACME))

    assert [one.tenant for one in world.router.decisions.log.listed(DecisionFilter())] == ["acme", "acme"]


@in_world(keys=KEYS)
async def test_each_tenants_legs_are_salted_and_public_legs_are_not(world: World):
    await world.pair()
    for key in (ACME, RIVAL, PUBLIC):
        assert (await world.ask(prompt(stream=True), x_baton_mode="disaggregated", **bearer(key))).status == 200
    await world.ask(prompt(cache_salt="own"), x_baton_mode="aggregated", **bearer(ACME))

    own = salt_of(SALTS, "acme", "own")
    salts = [salt_of(SALTS, "acme", ""), salt_of(SALTS, "rival", ""), ""]
    received = [start.cache_salt for name in ("p1", "d1") for start in world.workers[name].started]
    assert sorted(received) == sorted([*salts, *salts, own])


@in_world(keys=KEYS)
async def test_the_router_rejects_a_tenants_body_that_is_not_json(world: World):
    await world.worker("w1")
    response = await world.ask(b'{"prompt": NaN}', **bearer(ACME))

    assert (response.status, response.error["param"]) == (400, None)
    assert world.workers["w1"].started == []


@in_world(keys=KEYS)
async def test_a_migrated_stream_keeps_its_salt(world: World):
    one = await world.worker("w1", script=streams(2, fails(Reason.ENGINE_DEAD)))
    other = await world.worker("w2", script=streams())
    give_legs(world, "w2", 5)

    assert (await world.ask(prompt(stream=True), **bearer(ACME))).body == ANSWER
    assert [start.cache_salt for start in one.started + other.started] == [salt_of(SALTS, "acme", "")] * 2
    assert other.started[0].resume


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("key", [ACME, PUBLIC])
@in_world(keys=KEYS)
async def test_a_worker_gets_a_salt_of_the_tenant_for_names_of_media(world: World, key, path):
    worker = await world.worker("w1")

    for sender in (key, RIVAL):
        await world.ask({"model": "m", "messages": []}, path=path, **bearer(sender))

    own, others = (start.media_salt or start.cache_salt for start in worker.started)
    assert own
    assert others
    assert own != others
