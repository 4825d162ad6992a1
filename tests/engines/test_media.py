"""Media of requests: engines fetch none, and one tenant's names for media neither find nor replace another's.

The server, renderer, media connector and processor are vLLM's, with the worker's own arguments and environment; only the
engine behind them is missing (see ``front``). The model is a tiny BLIP-2, whose processor needs no torchvision.
"""

from __future__ import annotations

import base64
import io
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from PIL import Image

from services.worker.engines.port import CURRENT_LEG, Leg, LegInput
from services.worker.engines.vllm.arguments import prepare_import
from services.worker.engines.vllm.media import only_vllm_reads_media
from services.worker.legs.asgi_call import ask_app
from services.worker.tiny_model import EOS_ID
from tests.engines.front import CHAT, MODEL, Front, front, model_with_images

pytestmark = pytest.mark.vllm

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
ANSWER = [EOS_ID]


def picture(color: str) -> str:
    image = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(image, "PNG")
    return "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()


RED, BLUE = picture("red"), picture("blue")


class Web:
    """A server of the engine's own network: counts what is fetched, and redirects from ``/away``."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.fetched.append(self.path)
                away = self.path == "/away"
                self.send_response(302 if away else 200)
                self.send_header("Location", "/secret.png")
                image = b"" if away else base64.b64decode(RED.partition(",")[2])
                self.send_header("Content-Length", str(len(image)))
                self.end_headers()
                self.wfile.write(image)

            def log_message(self, *_args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        yield server


@pytest.fixture(autouse=True)
def workers_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What vLLM reads from the environment is what a worker sets; jinja2 stays as it was."""
    before = dict(os.environ)
    os.environ.pop("VLLM_MEDIA_URL_ALLOW_REDIRECTS", None)
    prepare_import(kv_host="127.0.0.1", model_is_local=True, rank_host="127.0.0.1")
    yield
    os.environ.clear()
    os.environ.update(before)
    if "concat" in vars(ImmutableSandboxedEnvironment):
        del ImmutableSandboxedEnvironment.concat


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Front]:
    async with front(model_with_images(tmp_path), "", ANSWER) as served:
        yield served


async def ask(server: Front, path: str, body: dict) -> tuple[int, str]:
    server.core.prompt_tokens, server.core.asked = 0, []
    status, answer = await ask_app(server.app, path, json.dumps(body).encode())
    return status, answer.decode()


def chat(*parts: object, role: str = "user") -> dict:
    return {"model": MODEL, "max_tokens": 2, "messages": [{"role": role, "content": [*parts]}]}


def urls(web: Web) -> list[str]:
    """One address in the ways in which a client may write it, and others that no client may read."""
    at = f"127.0.0.1:{web.port}/x.png"
    return [
        f"http://{at}",
        f"HTTP://{at}",
        f" http://{at}",
        f"http://{at}\n",
        f"http:/\\{at}",
        f"http://none; send data: URLs@{at}",
        f"http://localhost:{web.port}/x.png",
        f"http://[::ffff:127.0.0.1]:{web.port}/x.png",
        f"https://{at}",
        f"ftp://{at}",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "/etc/passwd",
    ]


def bodies(url: str) -> Iterator[tuple[str, dict]]:
    """Every form in which vLLM's endpoints take an image by its address."""
    plain = {"type": "image_url", "image_url": {"url": url}}
    for part in (
        plain,
        {"image_url": url},
        {"type": "image_url", "image_url": url, "uuid": "u"},
        {"image_url": {"url": url}, "uuid": "u"},
        {"type": "image", "image_url": RED, "uuid": "u", "url": url, "path": url},
        {"type": "input_image", "image_url": url},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "audio_url", "audio_url": {"url": url}},
    ):
        yield CHAT, chat(part)
        yield "/tokenize", chat(part)
    yield CHAT, chat(plain, role="system")
    yield (
        RESPONSES,
        {
            "model": MODEL,
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}],
        },
    )
    image = {"type": "image", "source": {"type": "url", "url": url}}
    yield MESSAGES, {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": [image]}]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    yield MESSAGES, {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": [result]}]}


async def test_an_engine_fetches_nothing_that_the_operator_has_not_named(server, web):
    asked = [(path, body) for url in urls(web) for path, body in bodies(url)]

    answers = [await ask(server, path, body) for path, body in asked]

    assert web.fetched == []
    assert {status for status, _answer in answers} == {
        200,
        400,
    }  # 200 where only fields that nothing reads have the URL.
    assert "BATON_MEDIA_DOMAINS" in answers[0][1]


async def test_a_named_host_is_fetched_from_but_cannot_redirect(tmp_path, web):
    hosts = frozenset({"localhost"})
    async with front(model_with_images(tmp_path), "", ANSWER, media_hosts=hosts) as served:
        got = {}
        for name, url in {
            "named": f"http://localhost:{web.port}/x.png",
            "away": f"http://localhost:{web.port}/away",
            "other": f"http://127.0.0.1:{web.port}/other.png",
        }.items():
            got[name], _answer = await ask(served, CHAT, chat({"type": "image_url", "image_url": {"url": url}}))

    assert (got["named"], got["other"]) == (200, 400)
    assert got["away"] != 200
    assert web.fetched == ["/x.png", "/away"]


def test_the_tokenizer_of_mistral_reads_neither_addresses_nor_files(web, tmp_path):
    """It reads messages a second time, after vLLM, and does not know vLLM's rules."""
    from mistral_common.protocol.instruct.chunk import ImageURLChunk
    from mistral_common.tokens.tokenizers.audio import Audio
    from mistral_common.tokens.tokenizers.image import image_from_chunk
    from transformers import tokenization_mistral_common

    only_vllm_reads_media()
    image = tmp_path / "x.png"
    image.write_bytes(base64.b64decode(RED.partition(",")[2]))
    address = f"http://127.0.0.1:{web.port}/x.png"

    assert image_from_chunk(ImageURLChunk(image_url=RED)).size == (32, 32)
    for url in (address, image.as_uri()):
        with pytest.raises(ValueError, match="data:"):
            image_from_chunk(ImageURLChunk(image_url=url))
    with pytest.raises(ValueError, match="data:"):
        Audio.from_url(address, strict=True, timeout=None)
    with pytest.raises(ValueError, match="data:"):
        tokenization_mistral_common.load_audio_as(address)
    assert web.fetched == []


async def names_of(server: Front, part: dict, *, cache_salt: str = "", media_salt: str = "") -> list[str]:
    """Under which names the engine would look for the media of this request; empty when the server refuses it."""
    CURRENT_LEG.set(Leg(LegInput(request_id="q", cache_salt=cache_salt, media_salt=media_salt)))
    status, answer = await ask(server, CHAT, chat({"type": "text", "text": "what is it"}, part))
    assert status in (200, 400), answer
    return [feature.identifier for request in server.core.asked for feature in request.mm_features]


async def test_a_name_that_a_client_gives_to_a_picture_is_its_tenants_own(server):
    named = {"type": "image_url", "image_url": {"url": RED}, "uuid": "logo"}
    hash_of_blue = (await names_of(server, {"type": "image_url", "image_url": {"url": BLUE}}))[0]
    forged = {"type": "image_url", "image_url": {"url": RED}, "uuid": hash_of_blue}

    a, b = [await names_of(server, named, media_salt=salt) for salt in ("a" * 64, "b" * 64)]
    again = await names_of(server, named, media_salt="a" * 64)

    assert len(a) == 1
    assert a == again != b
    assert await names_of(server, forged, media_salt="a" * 64) != [hash_of_blue]


async def test_a_picture_cached_under_a_name_is_found_by_its_tenant_only(server):
    named = {"type": "image_url", "image_url": {"url": RED}, "uuid": "logo"}
    by_name = {"type": "image_url", "image_url": None, "uuid": "logo"}
    a, b = {"media_salt": "a" * 64}, {"media_salt": "b" * 64}

    stored = await names_of(server, named, **a)

    assert await names_of(server, by_name, **b) == []
    assert await names_of(server, by_name, **a) == stored


async def test_equal_pictures_of_two_tenants_have_different_names(server):
    part = {"type": "image_url", "image_url": {"url": RED}}

    names = [
        (await names_of(server, part, cache_salt=salt, media_salt=salt))[0]
        for salt in ("", "a" * 64, "b" * 64, "a" * 64)
    ]

    assert len(set(names)) == 3
    assert names[1] == names[3]
