"""Files and batches: what clients send and get, what is refused, and what a lost router leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.router.batches.batches import BATCHES_MAX
from services.router.batches.files import SWEEP_S, UPLOAD_KEPT_S, Files
from services.router.batches.lines import LINES_MAX, usage_in
from services.router.batches.store import Records
from shared.bus.port import Envelope
from shared.bus.receiver import read_entry
from shared.contracts.api_keys import digest_of
from shared.contracts.batches import PART_BYTES, BatchUsage, StoredBatch, record_key
from shared.contracts.channels import FILES, REQUESTS_FINISHED
from shared.contracts.inference import RequestsFinished
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import LoopClock, in_virtual_time
from tests.unit.router.batches.batch_world import (
    COMPLETIONS,
    ENDED,
    KEYS,
    Client,
    Engine,
    another_router,
    jsonl,
    line,
    run_with_engine,
    with_engine,
)
from tests.unit.router.world import World, prompt

BATCH = f"batch_{'0' * 32}"


@with_engine()
async def test_a_batch_answers_each_line_once(world: World, engine: Engine, client: Client):
    made = await client.batch(jsonl(*(line(n) for n in range(100))), metadata={"a": "b"})
    assert (made["status"], made["metadata"]) == ("validating", {"a": "b"})
    batch = await client.until(made["id"], *ENDED)

    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
    assert (batch["error_file_id"], batch["errors"]) == (None, None)
    output = await client.lines(batch["output_file_id"])
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in output}
    assert len(output) == 100
    assert texts == {f"c{n}": f"p{n}" for n in range(100)}
    assert len(engine.prompts) == 100
    assert (await client.get("/batches"))["data"] == [batch]
    purposes = [one["purpose"] for one in (await client.get("/files"))["data"]]
    assert sorted(purposes) == ["batch", "batch_output"]


@with_engine()
async def test_a_batch_counts_the_tokens_of_its_answers_and_names_their_model(
    world: World, engine: Engine, client: Client
):
    engine.usage = {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": None,
    }
    made = await client.batch(jsonl(line(0), line(1), line(2, "bad")))
    batch = await client.until(made["id"], *ENDED)
    assert made["model"] is None
    assert made["usage"]["total_tokens"] == 0
    assert batch["model"] == "m"
    assert batch["usage"] == {
        "input_tokens": 18,
        "input_tokens_details": {"cached_tokens": 16},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 24,
    }
    several = await client.batch(jsonl(line(0), line(1, body={"model": "other", "prompt": "p"})))
    assert (await client.until(several["id"], *ENDED))["model"] is None


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (
            (
                b'{"usage": {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 5, '
                b'"output_tokens_details": {"reasoning_tokens": 2}}}'
            ),
            BatchUsage(input_tokens=7, cached_tokens=4, output_tokens=5, reasoning_tokens=2),
        ),
        (b'{"usage": {"prompt_tokens": 7, "total_tokens": 7}}', BatchUsage(input_tokens=7)),
        (b'{"usage": {"prompt_tokens": -7, "completion_tokens": "x"}}', BatchUsage()),
        (b'{"usage": {"prompt_tokens": true, "completion_tokens": 1e99}}', BatchUsage()),
        (b'{"usage": {"prompt_tokens": 99999999999999999999}}', BatchUsage()),
        (b'{"usage": []}', BatchUsage()),
        (b'{"usage": null}', BatchUsage()),
        (b"[]", BatchUsage()),
        (b"\xff", BatchUsage()),
    ],
)
def test_only_numbers_that_can_be_counts_are_counted(body: bytes, usage: BatchUsage):
    assert usage_in(body) == usage


@with_engine()
async def test_lines_that_engines_refuse_are_errors_and_lines_that_come_too_early_wait(
    world: World, engine: Engine, client: Client
):
    await world.workers["w1"].vanish()
    made = await client.batch(jsonl(line(0), line(1, "bad"), line(2)))
    await client.until(made["id"], "in_progress")
    await asyncio.sleep(60)
    assert (await client.get(f"/batches/{made['id']}"))["request_counts"]["completed"] == 0
    await world.worker("w2", script=Engine())
    batch = await client.until(made["id"], *ENDED)

    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    (error,) = await client.lines(batch["error_file_id"])
    assert (error["custom_id"], error["response"]["status_code"], error["error"]) == ("c1", 400, None)
    assert error["response"]["request_id"] == f"{made['id']}-2"


BROKEN = [
    (b"", [("empty_file", None)]),
    (b"\n \n", [("empty_file", None)]),
    (b"{\n" + jsonl(line(1)) + b"[]\n\xff\n", [("invalid_json_line", 1), ("invalid_json_line", 3), ("invalid_json_line", 4)]),
    (jsonl(line(1), line(1)), [("duplicate_custom_id", 2)]),
    (jsonl({**line(1), "custom_id": None}), [("missing_required_parameter", 1)]),
    (jsonl({**line(1), "custom_id": "x" * 513}), [("invalid_custom_id", 1)]),
    (jsonl(line(1, method="GET")), [("invalid_method", 1)]),
    (jsonl(line(1, url="/v1/embeddings")), [("invalid_url", 1)]),
    (jsonl(line(1, body=[])), [("missing_required_parameter", 1)]),
    (jsonl(line(1, body={"prompt": "x"})), [("missing_required_parameter", 1)]),
    (jsonl(line(1, body={"model": "m", "stream": True})), [("unsupported_parameter", 1)]),
    (b"[" * 100_000 + b"\n", [("invalid_json_line", 1)]),
    (b"\n" * 70_000, [("too_many_tasks", None)]),
]  # fmt: skip


@pytest.mark.parametrize(("content", "faults"), BROKEN)
@with_engine()
async def test_a_batch_with_broken_lines_fails_and_says_which(
    world: World, engine: Engine, client: Client, content: bytes, faults: list[tuple[str, int | None]]
):
    batch = await client.until((await client.batch(content))["id"], *ENDED)

    assert batch["status"] == "failed"
    assert [(one["code"], one["line"]) for one in batch["errors"]["data"]] == faults
    assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)
    assert not engine.prompts


@with_engine(files_bytes_max=50_000_000)
async def test_a_line_that_is_too_long_and_too_many_lines_fail_their_batch(
    world: World, engine: Engine, client: Client
):
    many = b"".join(
        b'{"custom_id":"%d","method":"POST","url":"%b","body":{"model":"m"}}\n' % (n, COMPLETIONS.encode())
        for n in range(LINES_MAX + 1)
    )
    for content, code in ((b"x" * 5_000_000, "line_too_long"), (many, "too_many_tasks")):
        batch = await client.until((await client.batch(content))["id"], *ENDED)
        assert [one["code"] for one in batch["errors"]["data"]] == [code]


@with_engine(batch_lines_at_once=8)
async def test_requests_of_clients_come_first(world: World, engine: Engine, client: Client):
    engine.stays = lambda text: text == "long"
    connection, _ = world.begin(msgspec.json.encode(prompt(prompt="long")))
    made = await client.batch(jsonl(*(line(n) for n in range(20))))
    engine.stays = lambda _text: True
    await client.until(made["id"], "in_progress")
    await asyncio.sleep(5)
    assert len(engine.prompts) == 1 + 8 // 4
    connection.leave()
    await asyncio.sleep(5)
    assert len(engine.prompts) == 1 + 8
    await client.call("POST", f"/batches/{made['id']}/cancel")
    assert (await client.until(made["id"], *ENDED))["status"] == "cancelled"


@with_engine()
async def test_lines_are_reported_as_lines_and_clients_requests_are_not(world: World, engine: Engine, client: Client):
    reported: dict[str, bool] = {}

    def heard(message: RequestsFinished, _envelope: Envelope) -> None:
        reported.update({one.request_id: one.is_batch for one in message.requests})

    await world.bus.subscribe(REQUESTS_FINISHED, heard)
    made = await client.batch(jsonl(line(1)))
    await client.until(made["id"], *ENDED)
    await world.ask(prompt(prompt="by a client"))
    await asyncio.sleep(1)

    assert sorted(reported.values()) == [False, True]
    assert reported[f"{made['id']}-1"]


@with_engine()
async def test_a_cancelled_batch_keeps_what_was_computed(world: World, engine: Engine, client: Client):
    engine.stays = lambda text: text != "p0"
    made = await client.batch(jsonl(*(line(n) for n in range(50))))
    while (await client.get(f"/batches/{made['id']}"))["request_counts"]["completed"] < 1:
        await asyncio.sleep(0.1)
    cancelling = await client.call("POST", f"/batches/{made['id']}/cancel")
    assert cancelling.json()["status"] == "cancelling"
    batch = await client.until(made["id"], *ENDED)

    assert batch["status"] == "cancelled"
    assert batch["cancelling_at"] <= batch["cancelled_at"]
    assert [one["custom_id"] for one in await client.lines(batch["output_file_id"])] == ["c0"]
    assert not world.router.relay.in_flight
    again = await client.call("POST", f"/batches/{made['id']}/cancel")
    assert again.status_code == 409


@with_engine()
async def test_what_is_not_served_in_time_has_expired(world: World, engine: Engine, client: Client):
    engine.stays = lambda text: text != "p0"
    file = await client.upload(jsonl(*(line(n) for n in range(50))))
    await Records(world.bus).create_batch(stored_batch(world, file["id"], expires_in_s=20))
    (made,) = (await client.get("/batches"))["data"]
    batch = await client.until(made["id"], *ENDED)

    assert batch["status"] == "expired"
    assert 0 <= batch["expired_at"] - made["expires_at"] <= 10
    assert batch["request_counts"] == {"total": 50, "completed": 1, "failed": 49}
    errors = await client.lines(batch["error_file_id"])
    assert {one["error"]["code"] for one in errors} == {"batch_expired"}
    assert sorted(one["custom_id"] for one in errors) == sorted(f"c{n}" for n in range(1, 50))
    assert not world.router.relay.in_flight


@with_engine()
async def test_a_tenant_that_makes_many_batches_forgets_those_that_ended_first(
    world: World, engine: Engine, client: Client
):
    file = await client.upload(jsonl(line(0)))
    old = stored_batch(world, file["id"], expires_in_s=20)
    for number in range(BATCHES_MAX):
        batch_id = f"batch_{number:032}"
        ended = {"status": "completed", "created_at": number}
        one = msgspec.structs.replace(old, key=record_key("", batch_id), id=batch_id, **ended)
        await Records(world.bus).create_batch(one)
    made = await client.batch(jsonl(line(0)))
    kept = {one.id for one in await Records(world.bus).batches("")}
    assert kept == {made["id"], *(f"batch_{number:032}" for number in range(1, BATCHES_MAX))}


def stored_batch(world: World, file_id: str, expires_in_s: int) -> StoredBatch:
    """As a router makes it, but with less time than clients can ask for."""
    file = world.hub.buckets["files"].values[record_key("", file_id)]
    now = LoopClock().wall_ms() // 1000
    return StoredBatch(
        key=record_key("", BATCH),
        id=BATCH,
        tenant="",
        api_key="",
        endpoint=COMPLETIONS,
        input_file_id=file_id,
        input=read_entry(FILES, record_key("", file_id), file.payload).segments,
        completion_window="24h",
        metadata=None,
        status="validating",
        created_at=now,
        expires_at=now + expires_in_s,
    )


@pytest.mark.parametrize("is_killed", [True, False])
@with_engine()
async def test_another_router_goes_on_and_no_line_is_lost_or_written_twice(
    world: World, engine: Engine, client: Client, is_killed: bool
):
    total, at_once = 200, 16
    engine.stays = lambda _text: len(engine.prompts) > 120
    async with another_router(world, batch_lines_at_once=at_once) as router:
        world.router.batches.runner._is_stopped = True
        made = await client.batch(jsonl(*(line(n) for n in range(total))))
        while len(engine.prompts) < 120 + at_once:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        done = (await client.get(f"/batches/{made['id']}"))["request_counts"]["completed"]
        if not is_killed:
            await router.batches.runner.stop()
    assert done == 120
    engine.stays = lambda _text: False
    world.router.batches.runner._is_stopped = False
    begun = LoopClock().now()
    batch = await client.until(made["id"], *ENDED)

    assert batch["request_counts"] == {"total": total, "completed": total, "failed": 0}
    ids = [one["custom_id"] for one in await client.lines(batch["output_file_id"])]
    assert sorted(ids) == sorted(f"c{n}" for n in range(total))
    assert len(engine.prompts) <= total + at_once
    assert LoopClock().now() - begun < (25 if is_killed else 5)


@with_engine()
async def test_a_router_that_was_cut_off_cannot_write_any_more(world: World, engine: Engine, client: Client):
    total = 40
    engine.stays = lambda text: int(text[1:]) >= 10
    async with another_router(world) as router:
        world.router.batches.runner._is_stopped = True
        made = await client.batch(jsonl(*(line(n) for n in range(total))))
        while (await client.get(f"/batches/{made['id']}"))["request_counts"]["completed"] < 10:
            await asyncio.sleep(0.1)
        router.bus.lose()
        engine.stays = lambda _text: False
        world.router.batches.runner._is_stopped = False
        batch = await client.until(made["id"], *ENDED)
        router.bus.restore()
        await asyncio.sleep(60)
        assert not router.batches.runner.runs

    assert batch["request_counts"] == {"total": total, "completed": total, "failed": 0}
    assert await client.get(f"/batches/{made['id']}") == batch
    ids = [one["custom_id"] for one in await client.lines(batch["output_file_id"])]
    assert sorted(ids) == sorted(f"c{n}" for n in range(total))


@with_engine()
async def test_a_batch_waits_while_nats_is_down(world: World, engine: Engine, client: Client):
    made = await client.batch(jsonl(*(line(n) for n in range(300))))
    while not engine.prompts:
        await asyncio.sleep(0.01)
    world.bus.lose()
    refused = await client.call("GET", f"/batches/{made['id']}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "bus_down")
    await asyncio.sleep(30)
    world.bus.restore()
    batch = await client.until(made["id"], *ENDED)

    assert batch["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
    ids = [one["custom_id"] for one in await client.lines(batch["output_file_id"])]
    assert sorted(ids) == sorted(f"c{n}" for n in range(300))


@with_engine(files_bytes_max=10_000, batch_lines_at_once=4)
async def test_results_larger_than_a_tenants_files_end_the_batch_and_what_was_written_stays(
    world: World, engine: Engine, client: Client
):
    made = await client.batch(jsonl(*(line(n) for n in range(60))))
    batch = await client.until(made["id"], *ENDED)

    assert batch["status"] == "failed"
    assert [one["code"] for one in batch["errors"]["data"]] == ["output_too_large"]
    assert len(await client.lines(batch["output_file_id"])) == batch["request_counts"]["completed"] > 0


@with_engine(keys=KEYS)
async def test_other_tenants_files_and_batches_are_unknown(world: World, engine: Engine, client: Client):
    other = Client(world.router, "o")
    made = await client.batch(jsonl(line(0)))
    batch = await client.until(made["id"], "completed")
    for path in (
        f"/files/{made['input_file_id']}",
        f"/files/{batch['output_file_id']}/content",
        f"/batches/{made['id']}",
    ):
        foreign, unknown = (
            await other.call("GET", path),
            await other.call("GET", path.replace("a", "b").replace("b", "c")),
        )
        assert foreign.status_code == unknown.status_code == 404
    for method, path in (("DELETE", f"/files/{made['input_file_id']}"), ("POST", f"/batches/{made['id']}/cancel")):
        assert (await other.call(method, path)).status_code == 404
    body = {"input_file_id": made["input_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    assert (await other.call("POST", "/batches", json=body)).status_code == 404
    assert (await other.get("/files"))["data"] == (await other.get("/batches"))["data"] == []
    assert (await Client(world.router).call("GET", "/files")).status_code == 401
    assert (await client.get(f"/files/{made['input_file_id']}"))["id"] == made["input_file_id"]


@with_engine()
async def test_files_are_read_listed_in_pages_and_deleted(world: World, engine: Engine, client: Client):
    content = bytes(range(256)) * 500
    files = []
    for number in range(3):
        files.append(
            await client.upload(
                content[number:],
                **({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"} if number == 2 else {}),
            )
        )
        await asyncio.sleep(0.1)  # in one second
    assert files[2]["expires_at"] - files[2]["created_at"] == 3600
    for number, file in enumerate(files):
        assert (file["bytes"], file["filename"], file["purpose"]) == (len(content) - number, "in.jsonl", "batch")
        assert (await client.call("GET", f"/files/{file['id']}/content")).content == content[number:]
    first = await client.get("/files?limit=2")
    assert [one["id"] for one in first["data"]] == [files[2]["id"], files[1]["id"]]
    assert first["has_more"]
    rest = await client.get(f"/files?after={first['last_id']}")
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([files[0]["id"]], False)
    deleted = await client.call("DELETE", f"/files/{files[0]['id']}")
    assert deleted.json() == {"id": files[0]["id"], "object": "file", "deleted": True}
    assert (await client.call("GET", f"/files/{files[0]['id']}")).status_code == 404
    parts = -(-len(content) // (30 * 1024))
    assert len(world.hub.buckets["file_parts"].values) == 2 * parts


@in_virtual_time
async def test_expired_files_are_unknown_and_then_removed():
    hub = MemoryHub()
    files = Files(Records(MemoryBus(hub)), LoopClock(), 1_000_000)
    sweeping = asyncio.create_task(files.sweep())
    kept = []
    for expires_s in (3600, 0):
        incoming = await files.incoming("acme")
        await incoming.add(b"x" * 100_000)
        kept.append(await files.keep("acme", incoming, filename="f", purpose="batch", expires_s=expires_s))
    await asyncio.sleep(3601)
    assert await files.find("acme", kept[0].id) is None
    assert await files.of_tenant("acme") == [kept[1]]
    await asyncio.sleep(SWEEP_S)
    assert list(hub.buckets["files"].values) == [kept[1].key]
    assert len(hub.buckets["file_parts"].values) == 4
    sweeping.cancel()


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 8, 33])
@in_virtual_time
async def test_what_a_lost_router_has_left_of_an_upload_is_removed(parts: int):
    hub = MemoryHub()
    lost = await Files(Records(MemoryBus(hub)), LoopClock(), 2_000_000).incoming("acme")
    await lost.add(b"x" * (parts * PART_BYTES + 1))
    assert len(hub.buckets["file_parts"].values) == parts
    files = Files(Records(MemoryBus(hub)), LoopClock(), 2_000_000)
    assert await files.of_tenant("acme") == []
    sweeping = asyncio.create_task(files.sweep())
    await asyncio.sleep(UPLOAD_KEPT_S - SWEEP_S)
    assert len(hub.buckets["file_parts"].values) == parts
    await asyncio.sleep(3 * SWEEP_S)
    assert not hub.buckets["file_parts"].values
    assert not hub.buckets["files"].values
    sweeping.cancel()


@in_virtual_time
async def test_a_file_outlives_the_record_of_its_upload():
    hub = MemoryHub()
    files = Files(Records(MemoryBus(hub)), LoopClock(), 1_000_000)
    incoming = await files.incoming("acme")
    await incoming.add(b"x" * 100_000)
    (upload,) = await Records(MemoryBus(hub)).files()
    kept = await files.keep("acme", incoming, filename="f", purpose="batch", expires_s=0)
    assert list(hub.buckets["files"].values) == [kept.key]
    await Records(MemoryBus(hub)).put_file(upload)  # As if its router had been lost in between.
    sweeping = asyncio.create_task(files.sweep())
    await asyncio.sleep(UPLOAD_KEPT_S + 2 * SWEEP_S)
    assert list(hub.buckets["files"].values) == [kept.key]
    assert b"".join([piece async for piece in files.content(kept)]) == b"x" * 100_000
    sweeping.cancel()


@with_engine()
async def test_a_file_that_a_batch_reads_is_not_deleted(world: World, engine: Engine, client: Client):
    engine.stays = lambda _text: True
    made = await client.batch(jsonl(line(0)))
    refused = await client.call("DELETE", f"/files/{made['input_file_id']}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "file_in_use")
    await client.call("POST", f"/batches/{made['id']}/cancel")
    await client.until(made["id"], "cancelled")
    assert (await client.call("DELETE", f"/files/{made['input_file_id']}")).status_code == 200


@with_engine(files_bytes_max=100_000)
async def test_files_that_are_refused_leave_nothing(world: World, engine: Engine, client: Client):
    parts = world.hub.buckets["file_parts"].values
    kept = await client.upload(b"x" * 60_000)
    before = dict(parts)
    head = {"content-type": "multipart/form-data; boundary=B"}
    part = b'--B\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    file = part % (b"file", b'; filename="f"', b"x" * 40_000)
    refused = [
        (await client.send(b"x" * 90_000), 413, "storage_full"),
        (await client.send(b"x" * 40_000, purpose="fine-tune"), 400, "invalid_purpose"),
        (await client.send(b"x" * 40_000, **{"expires_after[seconds]": "9"}), 400, "invalid_request"),
        (await client.call("POST", "/files", json={}), 415, "not_a_form"),
        (await client.call("POST", "/files", content=file, headers=head), 400, "bad_form"),
        (await client.call("POST", "/files", content=file + file + b"--B--\r\n", headers=head), 400, "bad_form"),
        (await client.call("POST", "/files", content=part % (b"purpose", b"", b"batch") + b"--B--\r\n", headers=head), 400, "bad_form"),
        (await client.call("POST", "/files", content=part % (b"purpose", b"", b"b" * 5000) + b"--B--\r\n", headers=head), 400, "bad_form"),
        (await client.call("POST", "/files", content=b"nonsense" * 9000, headers=head), 400, "bad_form"),
        (await client.call("POST", "/files", content=part * 20, headers=head), 400, "bad_form"),
    ]  # fmt: skip

    assert [(one.status_code, one.json()["error"]["code"]) for one, _, _ in refused] == [
        (status, code) for _, status, code in refused
    ]
    assert parts == before
    assert [one["id"] for one in (await client.get("/files"))["data"]] == [kept["id"]]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"endpoint": "/v1/audio/speech"}, 400, "endpoint"),
        ({"completion_window": "24"}, 400, "completion_window"),
        ({"completion_window": "8d"}, 400, "completion_window"),
        ({"metadata": []}, 400, "metadata"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata"),
    ],
)
@with_engine()
async def test_a_batch_that_asks_for_what_is_not_possible_is_refused(
    world: World, engine: Engine, client: Client, fields: dict[str, Any], status: int, param: str
):
    file = await client.upload(jsonl(line(0)))
    body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
    refused = await client.call("POST", "/batches", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
    assert not world.hub.buckets["batches"].values


@with_engine(files_bytes_max=0)
async def test_without_the_setting_there_are_no_files(world: World, engine: Engine, client: Client):
    for method, path in (("GET", "/files"), ("POST", "/files"), ("GET", "/batches"), ("POST", "/batches")):
        refused = await client.call(method, path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "files_not_kept")


def test_the_lines_of_a_revoked_key_are_not_served(tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)

    async def scenario(world: World, engine: Engine, client: Client) -> None:
        made = await client.batch(jsonl(line(0)))
        assert (await client.until(made["id"], *ENDED))["request_counts"]["completed"] == 1
        await world.workers["w1"].vanish()
        made = await client.batch(jsonl(line(1), line(2)))
        await client.until(made["id"], "in_progress")
        keys.write_text(KEYS.replace(digest_of(b"a"), digest_of(b"renewed")))
        await asyncio.sleep(60)
        batch = await Client(world.router, "renewed").until(made["id"], *ENDED)

        assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
        errors = await Client(world.router, "renewed").lines(batch["error_file_id"])
        assert {one["error"]["code"] for one in errors} == {"api_key_revoked"}
        assert len(engine.prompts) == 1

    run_with_engine(scenario, keys_file=str(keys))
