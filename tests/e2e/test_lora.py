"""LoRA adapters in a whole system: listed, placed, loaded and unloaded by the operator, and known to new workers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.system import System, baton, until

pytestmark = pytest.mark.nats

START_S_MAX = 120.0
MODEL = "baton-tiny"
PROMPT = "the same beginning of many prompts " * 40
DIGEST_CHARS = 64


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Its NATS has keys: an operator's key cannot order workers to load adapters itself."""
    folder = tmp_path_factory.mktemp("lora")
    for name, weights in (("sql-v1", b"1"), ("sql-v2", b"2"), ("mail", b"3")):
        write_adapter(folder / "loras" / name, weights)
    write_adapter(folder / "secret", b"4")
    env = {"WORKER_LORA_DIR": str(folder / "loras"), "WORKER_LORA_ADAPTERS": "mail=mail"}
    arguments = ("--engine", "simulated", "--prefill", "1", "--decode", "1")
    with System(folder / "state", *arguments, env=env) as one:
        one.wait_ready(START_S_MAX).until_exact(2)
        yield one


def write_adapter(folder: Path, weights: bytes) -> None:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)


def lora(system: System, *arguments: str) -> tuple[int, str, str]:
    return baton("lora", *arguments, "--state-dir", str(system.folder))


def complete(system: System, model: str, prompt: str = PROMPT) -> tuple[int, str, int]:
    """Status, text and cached tokens."""
    asked = {"model": model, "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
    answer = system.http.post("/v1/completions", json=asked)
    if answer.status_code != 200:
        return answer.status_code, answer.text, 0
    found = answer.json()
    cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return 200, found["choices"][0]["text"], cached


def endless(model: str) -> dict:
    return {"model": model, "prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}


def lora_gauges(system: System) -> list[str]:
    """The adapters of running requests, of each worker."""
    return [labels["running_lora_adapters"] for labels, _at in system.fleet_metrics().each("vllm:lora_requests_info")]


def listed(system: System) -> dict[str, dict]:
    return {one["id"]: one for one in system.http.get("/v1/models").json()["data"]}


def test_adapters_of_the_settings_are_listed_and_served_apart(system: System):
    models = until(lambda: listed(system) if "mail" in listed(system) else None, "the router lists the adapter")
    assert (models["mail"]["parent"], models[MODEL]["parent"]) == (MODEL, None)
    (files,) = models["mail"]["files"]
    assert len(files["sha256"]) == DIGEST_CHARS
    assert files["workers"] == {"prefill": 1, "decode": 1}

    plain, mail = complete(system, MODEL), complete(system, "mail")
    assert (plain[0], mail[0]) == (200, 200)
    assert plain[1] != mail[1]
    assert mail[2] == 0
    again = complete(system, "mail")
    assert again[1] == mail[1]
    assert again[2] > 0

    until(lambda: lora_gauges(system).count("") == 2, "no request has an adapter")
    with system.http.stream("POST", "/v1/completions", json=endless("mail")):
        until(lambda: "mail" in lora_gauges(system), "the metrics show the adapter of the running request")

    code, out, err = lora(system, "list")
    assert (code, err) == (0, "")
    assert "mail" in out
    assert "decode-1, prefill-1" in out


def test_the_operator_loads_replaces_and_unloads(system: System):
    assert complete(system, "sql")[0] == 404

    code, out, err = lora(system, "load", "sql", "sql-v1")
    assert (code, err) == (0, ""), out
    assert "decode-1 serves sql" in out
    until(lambda: "sql" in listed(system), "the router knows the adapter")
    first = complete(system, "sql")
    assert first[0] == 200

    code, out, _err = lora(system, "load", "sql", "sql-v2", "--json")
    assert code == 0
    digests = {change["digest"] for change in json.loads(out)["changes"]}
    assert len(digests) == 1
    until(
        lambda: [one["sha256"] for one in listed(system)["sql"]["files"]] == list(digests), "the router knows the files"
    )
    second = complete(system, "sql")
    assert (second[0], second[2]) == (200, 0)
    assert second[1] != first[1]

    code, out, _err = lora(system, "list", "--json")
    said = json.loads(out)
    (wanted,) = said["wanted"]
    assert (wanted["name"], wanted["path"], wanted["workers"]) == ("sql", "sql-v2", [])
    assert [order["order"]["path"] for order in said["orders"]][:2] == ["sql-v2", "sql-v1"]
    assert all("@" in order["order"]["by"] for order in said["orders"])
    log = (system.logs / "orchestrator.log").read_text()
    assert "adapter order by" in log
    assert "load 'sql' from 'sql-v2'" in log

    assert lora(system, "unload", "sql")[0] == 0
    until(lambda: complete(system, "sql")[0] == 404, "the adapter is unknown")
    assert complete(system, "mail")[0] == 200


def test_the_router_takes_orders_as_vllms_server_does(system: System):
    load = {"lora_name": "web", "lora_path": "sql-v1"}
    added = system.http.post("/v1/load_lora_adapter", json=load)
    assert (added.status_code, added.text) == (200, "Success: LoRA adapter 'web' added successfully.")
    until(lambda: "web" in listed(system), "the router knows the adapter")
    assert complete(system, "web")[0] == 200
    assert system.http.post("/v1/load_lora_adapter", json=load).status_code == 400
    outside = system.http.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": "../secret"})
    assert (outside.status_code, "only place" in outside.json()["error"]["message"]) == (400, True)
    assert "adapter order by 'a client of a router without keys'" in (system.logs / "orchestrator.log").read_text()

    removed = system.http.post("/v1/unload_lora_adapter", json={"lora_name": "web"})
    assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'web' removed successfully.")
    until(lambda: complete(system, "web")[0] == 404, "the adapter is unknown")
    assert system.http.post("/v1/unload_lora_adapter", json={"lora_name": "web"}).status_code == 404


def test_a_worker_that_starts_again_gets_what_was_ordered(system: System):
    assert lora(system, "load", "sql", "sql-v1")[0] == 0
    epoch = system.fleet()["decode-1"]["record"]["epoch"]
    os.kill(system.worker_pid("decode-1"), signal.SIGKILL)

    def has_it_again() -> bool:
        worker = system.fleet()["decode-1"]
        names = {one["name"] for one in worker["record"].get("adapters", ())}
        is_new = worker["record"]["epoch"] > epoch and worker["phase"] == "ready"
        return is_new and names == {"mail", "sql"}

    until(has_it_again, "the restarted worker has loaded both adapters", START_S_MAX)
    assert lora(system, "unload", "sql")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("load", "bad", "../secret"), "WORKER_LORA_DIR"),
        (("load", "bad", "nowhere"), "cannot be found"),
        (("load", MODEL, "mail"), "name of the model"),
        (("load", "bad", "mail", "--worker", "nobody"), "none of these workers"),
        (("load", "bad", "mail", "--model", "other"), "no worker of other"),
        (("unload", "bad"), "no worker"),
    ],
)
def test_an_order_that_cannot_be_carried_out_says_why(system: System, arguments: tuple[str, ...], why: str):
    code, out, err = lora(system, *arguments)

    assert code == 1
    assert why in out + err
    assert "bad" not in listed(system)
