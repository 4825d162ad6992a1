"""One simulated engine directly behind uvicorn: the reference of the router's latency, and the engine of other routers.

``python -m bench.direct_engine --port 8001`` reads the worker's WORKER_* variables. It answers what the P/D modes of
vllm-router 0.1.17 and sglang-router 0.3.2 send: vLLM's ``kv_transfer_params``, SGLang's ``bootstrap_room``. No KV moves.
``GET /bench/served`` counts the legs that it has served.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from typing import Any

import uvicorn
import uvloop

from services.worker.engines.asgi_answers import Receive, Send
from services.worker.engines.port import Identity
from services.worker.engines.simulated.app import SimulatedApp
from services.worker.engines.simulated.engine import start_engine
from services.worker.settings import Settings
from shared.contracts.ids import Epoch, WorkerId
from shared.runtime.settings import load, load_common

VOCABULARY = 32_000
BYTES_PER_BLOCK = 64
"""Of a prompt, for each block id that vLLM's prefill engine answers: 16 tokens of 4 bytes."""
MAX_TOKENS = re.compile(rb'"max_tokens":\s*\d+')
PREFILL_OF_VLLM = re.compile(rb'"do_remote_decode":\s*true')
DECODE_OF_VLLM = re.compile(rb'"do_remote_prefill":\s*true')
LEG_OF_SGLANG = b'"bootstrap_room"'
ABOUT = {
    "/get_server_info": {"tp_size": 1, "dp_size": 1},
    "/server_info": {"tp_size": 1, "dp_size": 1},
    "/get_model_info": {"is_generation": True},
    "/model_info": {"is_generation": True},
    "/version": {"version": "0.32.0"},
}
"""What the routers ask of their engines."""
TOKENS = {
    "/tokenize": b'{"count": 0, "max_model_len": 131072, "tokens": %s}',
    "/v1/completions/render": b'[{"request_id": "", "model": "baton-tiny", "sampling_params": {}, "token_ids": %s}]',
}
"""What vllm-router asks for the tokens of a prompt when it places by what is cached."""


class CountingApp:
    """The engine's app, with the P/D fields of other routers."""

    def __init__(self, app: SimulatedApp, role: str) -> None:
        self._app = app
        self._role = role
        self.served = {"prefill": 0, "decode": 0, "whole": 0}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["method"] == "GET":
            about = self.served if scope["path"] == "/bench/served" else ABOUT.get(scope["path"])
            if about is None:
                await self._app(scope, receive, send)
            else:
                await answer(send, json.dumps(about).encode())
        elif (form := TOKENS.get(scope["path"])) is not None:
            await answer(send, form % json.dumps(tokens_of(await read(receive))).encode())
        else:
            await self._serve(scope, await read(receive), send)

    async def _serve(self, scope: dict[str, Any], body: bytes, send: Send) -> None:
        kind, more = "whole", b""
        if PREFILL_OF_VLLM.search(body):
            kind, more = "prefill", b"," + kv_transfer_params(len(body))
        elif DECODE_OF_VLLM.search(body):
            kind = "decode"
        elif LEG_OF_SGLANG in body:
            kind = self._role
        if kind == "prefill":
            body = MAX_TOKENS.sub(b'"max_tokens":1', body)
        self.served[kind] += 1
        start: dict[str, Any] = {}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def pass_on(message: dict[str, Any]) -> None:
            """With the length of a body that is sent at once, as vLLM's server does."""
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            if start and not message["more_body"]:
                data = message["body"]
                message["body"] = data = data[:-1] + more + b"}" if more and start["status"] == 200 else data
                start["headers"].append((b"content-length", b"%d" % len(data)))
            if start:
                await send(start)
                start = {}
            await send(message)

        await self._app(scope, receive, pass_on)


def tokens_of(body: bytes) -> list[int]:
    """A token for each four bytes of the prompt: quick, and equal for equal beginnings."""
    prompt = json.loads(body)["prompt"].encode()
    return [int.from_bytes(prompt[at : at + 4]) % VOCABULARY for at in range(0, len(prompt), 4)]


def kv_transfer_params(body_bytes: int) -> bytes:
    """Where a prefill engine of vLLM offers the prompt's blocks."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_block_ids": list(range(body_bytes // BYTES_PER_BLOCK + 1)),
    }
    return b'"kv_transfer_params":' + json.dumps(params).encode()


async def read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def answer(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


async def serve(port: int, role: str) -> None:
    engine = await start_engine(
        load(Settings, "WORKER_"), load_common(), lambda _text: None, identity=Identity(WorkerId("w1"), Epoch(1))
    )
    config = uvicorn.Config(
        CountingApp(engine.app, role),
        port=port,
        http="httptools",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        backlog=4096,
    )
    await Server(config).serve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--role", choices=("prefill", "decode"), default="decode")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.role))


if __name__ == "__main__":
    main()
