"""Media that an engine would have to fetch are refused, with the setting's name, before an engine is asked."""

from __future__ import annotations

import json

import pytest

from services.router.placement.media import foreign_media
from services.router.request.fields import read_request
from shared.contracts.engine_paths import CHAT
from tests.unit.router.world import World, in_world

DATA = "data:image/png;base64,AAAA"
INSIDE = "http://169.254.169.254/latest/meta-data"
NAMED = frozenset({"cdn.example"})


def of_user(part: object) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}


def image(url: str) -> dict:
    return of_user({"type": "image_url", "image_url": {"url": url}})


ANTHROPIC = {"type": "image", "source": {"type": "url", "url": INSIDE}}
FORMS = [
    (CHAT, image(INSIDE)),
    (CHAT, of_user({"type": "image_url", "image_url": INSIDE, "uuid": "u"})),
    (CHAT, of_user({"type": "video_url", "video_url": {"url": INSIDE}})),
    (CHAT, of_user({"type": "audio_url", "audio_url": {"url": INSIDE}})),
    ("/tokenize", image(INSIDE)),
    ("/v1/embeddings", image(INSIDE)),
    ("/pooling", image(INSIDE)),
    ("/v1/responses", {"model": "m", "input": [{"content": [{"type": "input_image", "image_url": INSIDE}]}]}),
    ("/v1/responses", {"model": "m", "input": [{"output": [{"type": "input_image", "image_url": INSIDE}]}]}),
    ("/v1/messages", of_user(ANTHROPIC)),
    ("/v1/messages", of_user({"type": "tool_result", "content": [ANTHROPIC]})),
    ("/v1/rerank", {"query": "q", "documents": {"content": [{"type": "image_url", "image_url": {"url": INSIDE}}]}}),
    ("/score", {"data_1": "q", "data_2": [{"content": [{"type": "image_url", "image_url": {"url": INSIDE}}]}]}),
]


@pytest.mark.parametrize(("path", "body"), FORMS)
@in_world()
async def test_no_form_of_an_address_reaches_an_engine(world: World, path, body):
    worker = await world.worker("w1")

    answer = await world.ask(body, path=path)

    assert answer.status == 400
    assert "BATON_MEDIA_DOMAINS" in answer.error["message"]
    assert worker.started == []


@pytest.mark.parametrize(
    "url",
    ["HTTP://x/", " http://x/", "http:/\\x", "//x/y.png", "file:///etc/passwd", "FILE:/etc/passwd", "/etc/passwd", "ftp://x",
     "http://[", "http://cdn.example@x/", "http://x/?cdn.example", "ftp://cdn.example/", " data:image/png;base64,AA"],
)  # fmt: skip
def test_only_named_hosts_and_data_urls_are_allowed(url):
    assert foreign_media(json.dumps(image(url)).encode(), NAMED) is not None


@pytest.mark.parametrize("end", [r"\u0075rl", r"u\u0072l", r"ur\u006c", r"ur\u006C", r"\u0075\u0072\u006c"])
def test_escapes_hide_no_address(end):
    body = json.dumps(image("file:///etc/passwd")).replace('url"', f'{end}"').encode()

    assert b'url"' not in body
    assert foreign_media(body, NAMED) is not None


@pytest.mark.parametrize("url", [DATA, DATA.upper(), "https://cdn.example/a.png", "HTTP://CDN.example:8080/a.png", ""])
def test_data_urls_and_named_hosts_reach_the_engine(url):
    assert foreign_media(json.dumps(image(url)).encode(), NAMED) is None


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": 'Is {"image_url": "http://x"} valid JSON?'}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "input": {"image_url": INSIDE}}]}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"parameters": {"image_url": INSIDE}}}]},
        {"messages": [{"role": "user", "content": "x"}], "metadata": {"url": INSIDE}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "u"}]}]},
        {"messages": 'url"', "input": 7},
        {"messages": [[["url"]], 7, None, "url"], "prompt": "url"},
    ],
)  # fmt: skip
def test_addresses_that_no_engine_fetches_are_no_fault(body):
    assert read_request(CHAT, json.dumps({"url": 1, **body}).encode()).fault is None
