"""Endpoints of vLLM's server that one worker serves whole: forms of audio, embeddings, invocations, the tokenizer."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from urllib3.filepost import encode_multipart_formdata

from shared.bus.frame_sender import LegFrames
from shared.contracts.engine_paths import FORMS, INVOCATIONS, PASSED_THROUGH, TOKENIZER_INFO, TRANSCRIPTIONS
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegReport, StartLeg
from shared.contracts.workers import Role
from tests.unit.router.auth.test_api_keys import ACME, KEYS, TOP, bearer, entry
from tests.unit.router.fake_worker import JSON, FakeWorker
from tests.unit.router.http.test_http_server import running
from tests.unit.router.world import HttpResponse, World, give_legs, in_world

TYPE = "multipart/form-data; boundary=xyz"
AUDIO = b"RIFF\x00\x01[[[{{{\\u0000\r\n--xy"


def part(name: str, value: bytes, more: str = "") -> bytes:
    return b'--xyz\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), more.encode(), value)


FILE = part("file", AUDIO, '; filename="a.wav"')


def form(*parts: bytes, model: str = "m") -> bytes:
    return part("model", model.encode()) + FILE + b"".join(parts) + b"--xyz--\r\n"


def answer(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
    """Whatever was asked."""
    frames.head(200, JSON)
    frames.data(b'{"text":"hello"}')
    frames.end(LegReport(prompt_tokens=20, completion_tokens=5))


async def transcribe(world: World, body: bytes, path: str = TRANSCRIPTIONS, **headers: str) -> HttpResponse:
    return await world.ask(body, path=path, **{"content_type": TYPE, **headers})


@pytest.mark.parametrize("path", sorted(FORMS))
@in_world()
async def test_a_form_goes_byte_for_byte_to_one_worker(world: World, path):
    worker = await world.worker("w1", script=answer)

    response = await transcribe(world, form(part("stream", b"false")), path)

    assert (response.status, response.body) == (200, b'{"text":"hello"}')
    (start,) = worker.started
    assert (start.path, start.body) == (path, form(part("stream", b"false")))
    assert start.content_type == 'multipart/form-data; boundary="xyz"'
    assert start.kind.value == "aggregated"


@in_world()
async def test_a_request_goes_to_a_worker_whose_engine_serves_its_path(world: World):
    await world.worker("text", script=answer, paths=("/v1/completions",))
    speech = await world.worker("speech", Role.PREFILL, answer, paths=(TRANSCRIPTIONS,), models=("ears",))

    for _ in range(3):
        assert (await transcribe(world, form(model="ears"))).status == 200

    assert len(speech.started) == 3
    without_model = await transcribe(world, FILE + b"--xyz--")
    assert (without_model.status, without_model.error["param"]) == (400, "model")
    refused = await transcribe(world, form(model="m"))
    assert (refused.status, refused.error["code"]) == (404, "path_not_served")
    assert "`m`" in refused.error["message"]
    assert TRANSCRIPTIONS in refused.error["message"]
    embedding = await world.ask({"model": "m", "texts": ["x"]}, path="/v2/embed")
    assert (embedding.status, embedding.error["code"]) == (404, "path_not_served")
    assert (await transcribe(world, form(model="nobody"))).error["code"] == "model_not_found"
    assert world.workers["text"].started == []


@in_world()
async def test_another_attempt_goes_to_a_worker_that_serves_the_path_too(world: World):
    def breaks(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.fail(Failure(reason=Reason.WORKER_LOST, message="gone"))

    await world.worker("speech-1", script=breaks, paths=(TRANSCRIPTIONS,))
    text = await world.worker("text", script=answer, paths=("/v1/completions",))

    assert (await transcribe(world, form())).status in (502, 503)

    other = await world.worker("speech-2", script=answer, paths=(TRANSCRIPTIONS,))
    give_legs(world, "speech-2", 5)
    assert (await transcribe(world, form())).status == 200
    assert (len(other.started), text.started) == (1, [])


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed; boundary=xyz"],
)
@in_world()
async def test_a_form_must_be_one_by_its_type(world: World, content_type):
    worker = await world.worker("w1", script=answer)

    assert (await transcribe(world, form(), content_type=content_type)).status == 415
    assert (await world.ask(form(), path="/v1/embeddings", content_type=TYPE)).status == 415
    assert worker.started == []


BROKEN = {
    "empty": b"",
    "JSON": b'{"model":"m"}',
    "no end": form()[:-9],
    "more after the end": form() + b"x",
    "an end in the middle": part("model", b"m") + b"--xyz--\r\n" + FILE + b"--xyz--\r\n",
    "two models": form(part("model", b"other")),
    "a file named like the model's field": form(part("model", b"other", '; filename="model"')),
    "two names": form(part('a"; name="model', b"other")),
    "a name behind the file's": form(part("b", b"other", '; filename="a"; name="model"')),
    "a file by an extended name only": form(part("c", b"other", "; filename*=utf-8''x")),
    "a name without quotes": form(b"--xyz\r\nContent-Disposition: form-data; name=model\r\n\r\nother\r\n"),
    "two dispositions": form(
        b'--xyz\r\nContent-Disposition: form-data; name="d"\r\ncontent-disposition: form-data; name="model"\r\n\r\no\r\n'
    ),
    "an unknown header": form(b'--xyz\r\nContent-Disposition: form-data; name="e"\r\nX-A: b\r\n\r\no\r\n'),
    "a folded header": form(b'--xyz\r\nContent-Disposition: form-data;\r\n name="model"\r\n\r\nother\r\n'),
    "no head": form(b"--xyz\r\nother\r\n"),
    "a boundary that goes on": form(b'--xyzz\r\nContent-Disposition: form-data; name="f"\r\n\r\nother\r\n'),
    "a value too long": form(part("prompt", b"x" * 70_000)),
    "a head too long": form(part("f", b"x", f'; filename="{"x" * 5000}"')),
    "too many parts": form(*(part(f"p{number}", b"") for number in range(70))),
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
@in_world()
async def test_a_form_that_parsers_may_read_in_different_ways_is_refused(world: World, body):
    worker = await world.worker("w1", script=answer)

    response = await transcribe(world, body)

    assert response.status == 400
    assert response.error["message"].endswith(".")
    assert worker.started == []


@in_world(keys=TOP + entry(ACME, "acme", "tokens_per_minute = 6000"))
async def test_a_form_counts_as_what_it_generates(world: World):
    await world.worker("w1", script=answer)
    client = world.router.authenticator.client([(b"x-api-key", ACME.encode())])
    tokens = client.rate_limit._tokens
    before = tokens.level(world.router.clock.now())

    assert (await transcribe(world, form(part("n", b"2")), x_api_key=ACME)).status == 200

    assert before - tokens.level(world.router.clock.now()) == pytest.approx(25, abs=2)
    too_many = await transcribe(world, form(part("n", b"100000")), x_api_key=ACME)
    assert too_many.status == 400
    assert "sequences" in too_many.error["message"]


@in_world(keys=TOP + entry(ACME, "acme", 'models = ["m"]'))
async def test_a_keys_models_hold_for_forms_and_its_tenants_salt_goes_with_them(world: World):
    worker = await world.worker("w1", script=answer)

    assert (await transcribe(world, form(), x_api_key=ACME)).status == 200
    assert (await transcribe(world, form(model="other"), x_api_key=ACME)).status == 403
    assert (await transcribe(world, form())).status == 401
    (start,) = worker.started
    assert len(start.cache_salt) == 64
    assert start.body == form()


@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        ("/v2/embed", {"texts": ["a", "b", "c"]}, 3),
        ("/v2/embed", {"images": ["data:,", "data:,"]}, 2),
        ("/v2/embed", {"inputs": [{"content": []}] * 4}, 4),
        ("/v2/rerank", {"query": "q", "documents": ["a", "b"]}, 2),
        (INVOCATIONS, {"prompt": ["a", "b"], "n": 2}, 4),
        (INVOCATIONS, {"messages": [{"role": "user", "content": "x"}], "n": 3}, 3),
        (INVOCATIONS, {"input": ["a", "b", "c"]}, 3),
    ],
)
@in_world()
async def test_each_input_counts_as_a_sequence(world: World, path: str, body: dict[str, Any], sequences: int):
    worker = await world.worker("w1", script=answer)

    assert (await world.ask({"model": "m", **body}, path=path)).status == 200
    (start,) = worker.started
    assert (start.path, start.sequences) == (path, sequences)
    assert msgspec.json.decode(start.body) == {"model": "m", **body}


@pytest.mark.parametrize("name", ["a.wav", 'a "b"; c.wav', "\u00e9\u00e8.mp3", "my name=x.ogg"])
async def test_forms_of_the_official_sdk_and_of_http_libraries_are_read(name: str):
    from openai import AsyncOpenAI  # A second in each of the processes of `make check`.

    async with running() as up:
        up.worker.script = answer
        async with AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0) as client:
            granularities: Any = ["word", "segment"]
            made = await client.audio.transcriptions.create(
                file=(name, AUDIO), model="m", timestamp_granularities=granularities, extra_body={"seed": 1}
            )
            assert made.text == "hello"
            assert (await client.audio.translations.create(file=(name, AUDIO), model="m")).text == "hello"
        async with httpx.AsyncClient(base_url=up.url) as plain:
            sent = await plain.post(
                TRANSCRIPTIONS, data={"model": "m", "prompt": "\u00e9"}, files={"file": (name, AUDIO)}
            )
            assert sent.status_code == 200
        encoded, content_type = encode_multipart_formdata({"model": "m", "file": (name, AUDIO, "audio/wav")})
        async with httpx.AsyncClient(base_url=up.url) as plain:
            sent = await plain.post(TRANSCRIPTIONS, content=encoded, headers={"content-type": content_type})
            assert sent.status_code == 200


async def test_the_tokenizers_description_is_asked_with_get_of_a_worker_of_the_model():
    async with running(keys=KEYS) as up, httpx.AsyncClient(base_url=up.url, headers=bearer(ACME)) as client:
        up.worker.script = answer
        for path in (TOKENIZER_INFO, f"{TOKENIZER_INFO}?model=m"):
            assert (await client.get(path)).json() == {"text": "hello"}
        unknown = await client.get(TOKENIZER_INFO, params={"model": "nobody"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get(TOKENIZER_INFO, headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await client.post(TOKENIZER_INFO, json={})).status_code == 405

        assert [(start.path, start.body) for start in up.worker.started] == [(TOKENIZER_INFO, b"")] * 2


async def test_the_health_check_of_proxies_counts_workers_by_role():
    async with running(keys=KEYS) as up, httpx.AsyncClient(base_url=up.url) as client:
        answered = await client.get("/healthcheck")
        assert answered.status_code == 200
        assert answered.json() == {"status": "ok", "prefill_instances": 1, "decode_instances": 1}

        up.router.fleet.cluster.lose(up.worker.worker_id, up.worker.epoch)
        lost = await client.get("/healthcheck")
        assert (lost.status_code, lost.json()["prefill_instances"]) == (503, 0)


async def test_decisions_answer_under_their_old_path_and_say_that_it_is_deprecated():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        made = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
        decision_id = made.headers["x-baton-decision"]

        for path in ("", f"/{decision_id}", "/latest"):
            old, new = await client.get(f"/v1/decisions{path}"), await client.get(f"/baton/decisions{path}")
            assert (old.status_code, old.json()) == (200, new.json())
            assert old.headers["deprecation"].startswith("@")
            assert old.headers["link"] == '</baton/decisions>; rel="successor-version"'
            assert "deprecation" not in new.headers


async def test_every_path_is_in_the_openapi_document_with_its_kind_of_body():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]

    assert set(PASSED_THROUGH) <= paths.keys()
    for path in PASSED_THROUGH:
        (kind,) = paths[path]["post"]["requestBody"]["content"]
        assert kind == ("multipart/form-data" if path in FORMS else "application/json")
    assert "get" in paths[TOKENIZER_INFO]
    assert paths["/v1/decisions"]["get"]["deprecated"]
