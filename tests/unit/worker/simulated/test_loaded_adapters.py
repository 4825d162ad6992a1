"""The simulated engine computes other tokens with an adapter, and its blocks are not the model's."""

from __future__ import annotations

import msgspec
import pytest

from services.worker.engines.adapters import CONFIG, WEIGHTS
from services.worker.engines.port import CURRENT_LEG, Leg, LegInput
from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.engines.simulated.engine import SimulatedEngine, SimulatedModel, open_simulated_engine
from services.worker.legs.asgi_call import ask_app
from services.worker.tiny_model import TINY_MODEL, ensure_tiny_tokenizer
from shared.contracts.kv_events import unpack_hashes
from tests.unit.worker.simulated.builders import INSTANT

PROMPT = list(range(10, 140))
CACHED = 128
COMPLETIONS = "/v1/completions"


@pytest.fixture
async def engine(tmp_path_factory):
    directory = ensure_tiny_tokenizer(tmp_path_factory.mktemp("models"))
    settings = SimulationSettings(kv_blocks=512, max_model_len=2048, **INSTANT)
    opened = await open_simulated_engine(settings, SimulatedModel(directory=directory))
    yield opened
    await opened.close(1.0)


async def load(engine: SimulatedEngine, folder, name: str, weights: bytes) -> None:
    source = folder / f"{name}-{weights.decode()}"
    source.mkdir(exist_ok=True)
    (source / CONFIG).write_text("{}")
    (source / WEIGHTS[0]).write_bytes(weights)
    await engine.adapters.load(name, source)


async def complete(engine: SimulatedEngine, model: str) -> tuple[int, tuple[int, ...], int]:
    """Status, tokens, cached tokens."""
    leg = Leg(LegInput(request_id="r"))
    token = CURRENT_LEG.set(leg)
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    try:
        status, _body = await ask_app(engine.app, COMPLETIONS, msgspec.json.encode(body))
    finally:
        CURRENT_LEG.reset(token)
    return status, tuple(leg.result.token_ids), leg.result.cached_tokens


async def test_each_adapter_has_its_own_tokens_and_its_own_cache(engine, tmp_path):
    await load(engine, tmp_path, "sql", b"1")
    await load(engine, tmp_path, "mail", b"2")
    names = (TINY_MODEL, "sql", "mail")

    first = {name: await complete(engine, name) for name in names}
    again = {name: await complete(engine, name) for name in names}

    assert len({tokens for _status, tokens, _cached in first.values()}) == 3
    for name in names:
        assert (first[name][0], first[name][2]) == (200, 0), name
        assert again[name] == (200, first[name][1], CACHED), name


async def test_new_files_under_a_name_use_nothing_of_the_old_ones(engine, tmp_path):
    await load(engine, tmp_path, "sql", b"1")
    _, before, _ = await complete(engine, "sql")

    await load(engine, tmp_path, "sql", b"2")
    status, after, cached = await complete(engine, "sql")

    assert (status, cached) == (200, 0)
    assert after != before


async def test_an_adapter_that_is_not_loaded_is_unknown(engine, tmp_path):
    assert (await complete(engine, "sql"))[0] == 404

    await load(engine, tmp_path, "sql", b"1")
    await engine.adapters.unload("sql")

    assert (await complete(engine, "sql"))[0] == 404


async def test_probes_are_hashed_as_requests_are(engine, tmp_path):
    await load(engine, tmp_path, "sql", b"1")
    await complete(engine, "sql")
    held = {
        hash_ for batch in [await anext(engine.kv_events())] for event in batch for hash_ in unpack_hashes(event.hashes)
    }

    body = {"model": "sql", "prompt": PROMPT}
    told = await engine.tokens(COMPLETIONS, msgspec.json.encode(body))
    plain = await engine.tokens(COMPLETIONS, msgspec.json.encode({**body, "model": TINY_MODEL}))

    assert set(told.hashes) <= held
    assert not set(plain.hashes) & held
