"""``baton explain`` finds a decision by the response's header, over HTTP and NATS, and draws it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from shared.contracts.decisions import DecisionRecord, Part
from tests.support.system import System, baton, until

START_S_MAX = 120.0
SLOW = {"WORKER_SIMULATED": "prefill_tokens_per_s=8000,prefill_base_s=0.02,decode_base_s=0.01"}
"""Slow enough that the simulated times exceed the machine's noise."""
ROUTERS = 2
CLIENT_S = 5.0
"""Seconds that the client's connection and other load on the machine may add to a TTFT."""

pytestmark = pytest.mark.nats


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("explain")
    arguments = ("--engine", "simulated", "--prefill", "2", "--decode", "2", "--routers", str(ROUTERS))
    with System(folder, *arguments, env=SLOW) as system:
        system.wait_ready(START_S_MAX)
        until(lambda: answers_apart(system), "prefill and decode workers take part")
        yield system


def answers_apart(system: System) -> bool:
    return ask(system, "Are you there? " * 20).headers.get("x-baton-mode") == "disaggregated"


def ask(system: System, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": 8, **fields}
    headers = fields.pop("headers", {})
    return httpx.post(f"{system.endpoint}/v1/completions", json=body, headers=headers, timeout=60.0, trust_env=False)


def stream(system: System, prompt: str) -> tuple[str, float]:
    """The decision's id, and the time to the first token as the client sees it."""
    body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": 8, "stream": True}
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        client.get(f"{system.endpoint}/health")  # The connection is there.
        begun = time.perf_counter()
        with client.stream("POST", f"{system.endpoint}/v1/completions", json=body) as answer:
            events = answer.iter_bytes()
            next(events)
            ttft_s = time.perf_counter() - begun
            for _event in events:
                pass
    return answer.headers["x-baton-decision"], ttft_s


def explained(system: System, *arguments: str) -> DecisionRecord:
    code, out, err = baton("explain", *arguments, "--json", "--state-dir", str(system.folder))
    assert code == 0, err
    return msgspec.json.decode(out, type=DecisionRecord)


def check(told: DecisionRecord) -> None:
    """The numbers of a decision that went well agree with each other."""
    assert told.outcome == "ok"
    assert told.measured is not None
    assert told.measured.total_s() == pytest.approx(told.ttft_s, rel=0.02, abs=1e-6)
    assert all(getattr(told.measured, name) >= 0 for name in told.measured.__struct_fields__)
    parts = {Part.PREFILL, Part.DECODE} if told.prefill_worker else {Part.WHOLE}
    for part in parts:
        (chosen,) = [one for one in told.candidates if one.part is part and one.chosen]
        assert chosen.worker_id == (told.prefill_worker if part is Part.PREFILL else told.decode_worker)
    for one in told.candidates:
        computed_s, handed_s = one.queue_s + one.fetch_s + one.prefill_s, one.handoff_s + one.decode_prefill_s
        after_s = one.decode_s - one.within_s + one.others_s
        assert one.cost_s == pytest.approx(computed_s + handed_s + one.front_end_and_bus_s + after_s)
        if one.part is not Part.DECODE:
            assert one.cached_tokens + one.fetched_tokens + one.computed_tokens == told.prompt_tokens
    assert {one.part for one in told.candidates if one.chosen} == parts
    assert len(told.candidates) <= told.considered * len(Part)


@pytest.mark.parametrize("repeats", [3, 900], ids=["short", "streamed handoff"])
def test_a_streams_decision_accounts_for_the_clients_ttft(system: System, repeats: int):
    decision_id, waited_s = stream(
        system, f"A story of {repeats} words about the sea and those who sail it. " * repeats
    )

    told = explained(system, decision_id)

    check(told)
    assert told.decision_id == decision_id
    assert told.mode == "disaggregated"
    assert told.measured is not None
    assert told.ttft_s <= waited_s <= told.ttft_s + CLIENT_S
    assert told.measured.prefill_s > 0
    assert told.cached_tokens == 0


def test_the_ttft_of_an_unstreamed_response_is_its_first_token(system: System):
    answer = ask(system, "Once more, with feeling. " * 40, max_tokens=64)

    told = explained(system, answer.headers["x-baton-decision"])

    check(told)
    assert told.ttft_s < answer.elapsed.total_seconds() - 60 * 0.01  # Of 64 tokens, one each 10 ms.


def test_cached_tokens_are_predicted_exactly(system: System):
    prompt = "The same long introduction that everybody has to read first. " * 60

    def again() -> DecisionRecord | None:
        told = explained(system, ask(system, prompt).headers["x-baton-decision"])
        return told if told.predicted_cached_tokens > 0 else None

    told = until(again, "the router has heard what is cached")

    check(told)
    assert told.exact
    assert told.cached_tokens == told.predicted_cached_tokens > 0.9 * told.prompt_tokens


def test_every_router_and_nats_find_the_decision(system: System):
    answer = ask(system, "Who knows about this?", headers={"x-request-id": "who-knows"})
    decision_id = answer.headers["x-baton-decision"]
    urls = [system.endpoint, *json.loads((system.folder / "running.json").read_text())["routers"].values()]

    by_url = [explained(system, decision_id, "--url", url) for url in urls]
    by_request = [explained(system, "--request", answer.headers["x-request-id"], "--url", url) for url in urls]
    by_nats = explained(system, decision_id, "--nats-url", system.nats_url)
    newest = explained(system)

    assert len(urls) == ROUTERS + 1
    assert {one.decision_id for one in (*by_url, *by_request, by_nats, newest)} == {decision_id}


def test_the_picture_names_the_same_workers(system: System):
    answer = ask(system, "Paint it. " * 100)
    decision_id = answer.headers["x-baton-decision"]
    told = explained(system, decision_id)

    code, drawn, err = baton("explain", decision_id, "--state-dir", str(system.folder), env={"COLUMNS": "80"})

    assert (code, err) == (0, "")
    assert max(map(len, drawn.splitlines())) <= 80
    assert f"prefill on {told.prefill_worker}, decode on {told.decode_worker}" in " ".join(drawn.split())
    for text in (decision_id, "prefill", "total", "predicted", "measured"):
        assert text in drawn


def test_a_refusal_is_explained(system: System):
    answer = ask(system, "Is there anybody?", model="nobody")

    told = explained(system, answer.headers["x-baton-decision"])
    code, drawn, _err = baton("explain", told.decision_id, "--state-dir", str(system.folder))

    assert answer.status_code == 404
    assert (told.mode, told.outcome, told.reason) == ("", "model_unknown", answer.json()["error"]["message"])
    assert code == 0
    assert "was not placed (model_unknown)" in drawn


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["router-x-d" + "7" * 32], "Router router-x, named by this id"),
        (["a-request-of-yesterday"], "No router has a decision for the request"),
        (["latest", "--url", "http://127.0.0.1:9"], "No router responds at"),
        (["latest", "--url", "nonsense"], "is not the URL of a router"),
        (["latest", "--nats-url", "nats://127.0.0.1:9"], "NATS at nats://127.0.0.1:9 does not respond"),
    ],
)
def test_an_unknown_decision_gives_an_error_with_advice(system: System, arguments: list[str], text: str):
    code, out, err = baton("explain", *arguments, "--state-dir", str(system.folder))

    assert (code, out) == (1, "")
    assert text in err
    assert "Traceback" not in err


def test_a_wrong_or_missing_router_gives_advice(system: System, tmp_path):
    collector = f"http://127.0.0.1:{system.collector_port}"

    code, _out, err = baton("explain", "--url", collector)
    assert code == 1
    assert "is not a Baton router" in err

    code, _out, err = baton("explain", "--state-dir", str(tmp_path))
    assert code == 1
    assert "--url http://HOST:8000" in err
