"""How fast one simulated engine is on one core when nothing in it takes time: `python bench/bench_simulated.py`.

It must be far faster than a router, or a benchmark of routers measures the engine.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import uvloop

from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.engines.simulated.engine import open_simulated_engine
from services.worker.engines.simulated.model import SimulatedModel
from services.worker.tiny_model import CORPUS, ensure_tiny_tokenizer

INSTANT = {
    "sim_prefill_tokens_per_s": 0.0,
    "sim_prefill_base_s": 0.0,
    "sim_decode_base_s": 0.0,
    "sim_decode_per_sequence_s": 0.0,
    "sim_transfer_bytes_per_s": 0.0,
    "sim_transfer_base_s": 0.0,
}


async def call(app, body: bytes) -> int:
    """Events (or answers) of one request."""
    sent = 0

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        nonlocal sent
        sent += message["type"] == "http.response.body"

    await app({"type": "http", "method": "POST", "path": "/v1/completions"}, receive, send)
    return sent


async def measure(app, bodies: list[bytes], concurrency: int) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds, events."""
    pending = iter(bodies)
    events = 0

    async def client():
        nonlocal events
        for body in pending:
            sent = await call(app, body)
            events += sent

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return time.perf_counter() - wall, time.process_time() - cpu, events


def bodies(count: int, chars: int, **fields) -> list[bytes]:
    corpus = CORPUS.read_text() * 4
    return [
        json.dumps({"prompt": f"{i} {corpus[i * 7 % 9000 :][:chars]}", "ignore_eos": True, **fields}).encode()
        for i in range(count)
    ]


async def main(scale: float) -> None:
    settings = SimulationSettings(kv_blocks=20_000, max_num_batched_tokens=8192, **INSTANT)
    with tempfile.TemporaryDirectory() as directory:
        model = SimulatedModel(directory=ensure_tiny_tokenizer(Path(directory)))
        engine = await open_simulated_engine(settings, model)
        print(f"{'case':42} {'requests/s':>11} {'events/s':>11} {'us CPU/event':>13}")
        for name, count, concurrency, chars, fields in (
            ("short, 8 tokens, not streamed, 64 at once", 8000, 64, 60, {"max_tokens": 8}),
            ("streams of 128 tokens, 1 at once", 100, 1, 60, {"max_tokens": 128, "stream": True}),
            ("streams of 128 tokens, 64 at once", 2000, 64, 60, {"max_tokens": 128, "stream": True}),
            ("streams of 128 tokens, 256 at once", 2000, 256, 60, {"max_tokens": 128, "stream": True}),
            ("8k-token prompts, 64 tokens, 32 at once", 100, 32, 33_000, {"max_tokens": 64, "stream": True}),
        ):
            made = bodies(int(count * scale), chars, **fields)
            wall, cpu, events = await measure(engine.app, made, concurrency)
            print(f"{name:42} {len(made) / wall:11.0f} {events / wall:11.0f} {cpu / events * 1e6:13.1f}")
        await engine.close(1.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    uvloop.run(main(parser.parse_args().scale))
