"""The fleet file: what each host runs, and errors that name table and key."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from services.launcher.commands.fleet import show_fleet
from services.launcher.fleet.fleet_file import Fleet, HostPart, WrongFleetFile, part_of, read_fleet_file
from services.launcher.fleet.head import head_options
from services.launcher.system.options import UpOptions
from services.launcher.system.plan import plan_system, plan_workers, worker_names
from services.launcher.system.process_plan import Machine, Stage, SystemPlan
from shared.contracts.workers import Role
from tests.support.processes import ROOT

FILE = """
[nats]
port = 4333

[router]
port = 8080

[env]
ROUTER_WAKE_S_MAX = 30
WORKER_LEGS_MAX = 7

[[model]]
name = "A"
aliases = ["chat"]
kv_cache = "2G"

[[model]]
name = "B"

[[host]]
name = "one"
address = "10.0.0.1"
workers = [{ model = "A", role = "prefill", count = 2 }]

[[host]]
name = "two"
gpus = [2, 3]
workers = [
  { model = "A", role = "decode", gpus_per_worker = 2 },
  { model = "B", role = "both" },
  { model = "A", role = "store", memory = "3GiB" },
]

[host.env]
WORKER_LEGS_MAX = 9
"""
MACHINE = Machine(python="python", nats_server="/bin/nats-server", cores=(0, 1, 2, 3))


@pytest.fixture
def fleet() -> Fleet:
    return read_fleet_file(FILE)


def head_plan(fleet: Fleet) -> SystemPlan:
    return plan_system(head_options(fleet, part_of(fleet, "one"), Path("/s"), Path("/s/cluster")), MACHINE)


def test_the_head_host_runs_nats_on_its_address_the_services_and_its_own_workers(fleet: Fleet):
    plan = head_plan(fleet)

    names = [process.name for process in plan.processes]
    assert names == ["nats", "orchestrator", "collector", "router", "one-prefill-1", "one-prefill-2"]
    assert plan.nats_url == "tls://10.0.0.1:4333"
    [nats] = [process for process in plan.processes if process.name == "nats"]
    assert "--addr 10.0.0.1 --port 4333" in " ".join(nats.command)
    [router] = [process for process in plan.processes if process.name == "router"]
    assert (router.env["ROUTER_HOST"], router.env["ROUTER_PORT"]) == ("10.0.0.1", "8080")


def test_a_row_of_workers_may_be_data_parallel_groups():
    file = FILE.replace('role = "prefill", count = 2', 'role = "prefill", count = 2, data_parallel = 2')
    plan = head_plan(read_fleet_file(file))

    workers = [(each.name, each.group, each.env["WORKER_DATA_PARALLEL_RANK"]) for each in plan.stage(Stage.WORKERS)]
    assert workers == [
        ("one-prefill-1", "one-prefill-1", "0"), ("one-prefill-2", "one-prefill-1", "1"),
        ("one-prefill-3", "one-prefill-3", "0"), ("one-prefill-4", "one-prefill-3", "1"),
    ]  # fmt: skip


def test_another_host_has_its_models_devices_and_variables(fleet: Fleet):
    part = part_of(fleet, "two")

    a, b = part.models
    assert (a.model, a.decode, a.store, a.gpus_of(Role.DECODE), a.aliases, a.kv_cache_bytes) == (
        "A", 1, 1, 2, ("chat",), 2 * 2**30
    )  # fmt: skip
    assert (a.host_memory_bytes, b.host_memory_bytes) == (3 << 30, 0)
    assert (b.model, b.both) == ("B", 1)
    assert part.gpus == ("2", "3")
    assert part.env == {"ROUTER_WAKE_S_MAX": "30", "WORKER_LEGS_MAX": "9"}
    assert part.of_workers.env == {"WORKER_LEGS_MAX": "9"}


def with_servers(fleet_text: str = FILE) -> str:
    servers = (
        '{ model = "B", attach = "http://h:1=theirs", attach_key_file = "/key", count = 2 }, '
        '{ model = "B", attach = "https://cloud/v1", attach_key_file = "/key" }, '
    )
    return fleet_text.replace('{ model = "B", role = "both" },', servers)


def test_a_host_has_workers_for_servers_outside_of_baton():
    fleet = read_fleet_file(with_servers())

    part = part_of(fleet, "two")
    [_a, b] = part.models
    assert b.attach == ("http://h:1=theirs", "http://h:1=theirs", "https://cloud/v1")
    assert (b.attach_key_file, b.roles) == ("/key", [])
    assert [*worker_names(part.models, "two")][-3:] == ["two-attached-1", "two-attached-2", "two-attached-3"]
    screen = io.StringIO()
    show_fleet(Console(file=screen, width=80, highlight=False, soft_wrap=True), fleet)
    assert screen.getvalue().splitlines()[-2:] == [
        "  two-attached-2  B at http://h:1=theirs",
        "  two-attached-3  B at https://cloud/v1",
    ]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"https://cloud/v1"', '"cloud"', "[[host]] 'two' workers: attach: write it as http://HOST:PORT"),
        ('"https://cloud/v1"', '"https://c", role = "both"', "[[host]] 'two' workers: write either role, or attach"),
        ('attach = "https://cloud/v1", ', "", "[[host]] 'two' workers: write either role, or attach"),
        ('attach_key_file = "/key" }', 'attach_key_file = "key" }', "attach_key_file: write an absolute path"),
        ('attach_key_file = "/key" }', 'attach_key_file = "/k" }', "[[host]] 'two' workers: all servers of 'B' on one"),
        ('"3GiB" }', '"3GiB", attach_key_file = "/k" }', "attach_key_file has the key for a server"),
        ('[[model]]\nname = "B"\n', "", "[[host]] 'two' workers: 'B' is not a model of this file; known: A"),
    ],
)
def test_an_error_about_a_server_says_what_to_write(before: str, after: str, message: str):
    text = with_servers()
    assert before in text
    with pytest.raises(WrongFleetFile) as wrong:
        read_fleet_file(text.replace(before, after, 1))

    assert message in str(wrong.value)


def test_a_server_needs_a_name_by_which_clients_ask():
    with pytest.raises(WrongFleetFile, match="model is missing: clients ask for the server's model by this name"):
        read_fleet_file('[[host]]\nname = "one"\nworkers = [{ attach = "http://h:1" }]')


def test_a_file_with_one_host_needs_no_address():
    fleet = read_fleet_file('[[host]]\nname = "one"\nworkers = [{ role = "both" }]')

    assert part_of(fleet, "one") == HostPart(name="one", models=part_of(fleet, "one").models)
    assert head_plan(fleet).nats_url == "tls://127.0.0.1:4222"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[nats]", "[natz]", "'natz' is not a key here; did you mean 'nats'?"),
        ("port = 4333", "prot = 4333", "[nats] 'prot' is not a key here; did you mean 'port'?"),
        ("port = 4333", 'port = "x"', "[nats] port: Expected `int`, got `str`"),
        ("port = 8080", "port = 80800", "[router] port: Expected `int` <= 65535"),
        ('kv_cache = "2G"', 'kv_cache = "big"', "[[model]] 'A' kv_cache: 'big' is not a size"),
        ("gpus = [2, 3]", "gpu = [2, 3]", "[[host]] 'two' 'gpu' is not a key here; did you mean 'gpus'?"),
        ("gpus = [2, 3]", 'gpus = "2"', "[[host]] 'two' gpus: Expected `array`, got `str`"),
        ("gpus = [2, 3]", "gpus = [2]\ncores = [1]", "[[host]] 'two' cores: workers run on gpus or on cores"),
        ('role = "both"', 'role = "bot"', "[[host]] 'two' workers: 'bot' is not a value of role; did you mean 'both'?"),
        ('aliases = ["chat"]', 'connector = "nixl"', "[[model]] 'A' 'nixl' is not a value of connector; known: baton,"),
        ('aliases = ["chat"]', 'kv_backend = "U CX"', "[[model]] 'A' kv_backend: Expected `str` matching regex"),
        ("[nats]", 'engine = "sglang"\n[nats]', "'sglang' is not a value of engine; known: vllm, simulated"),
        ('model = "B", role', 'modl = "B", role', "[[host]] 'two' workers: 'modl' is not a key here"),
        ('model = "B", role', "role", "[[host]] 'two' workers: model is missing; name one of A, B"),
        ('model = "B", role', 'model = "Bee", role', "[[host]] 'two' workers: 'Bee' is not a model of this file"),
        ('role = "store"', 'role = "decode"', "[[host]] 'two' workers: memory is the size of stores"),
        ('"3GiB"', '"much"', "[[host]] 'two' workers: memory: 'much' is not a size; write it like 512M or 2G"),
        ('"store", memory = "3GiB"', '"decode"', "[[host]] 'two' workers: role 'decode' occurs twice"),
        ('role = "prefill"', 'role = "decode"', "workers of A: none of the fleet would prefill"),
        ('address = "10.0.0.1"', "", "[[host]] 'one' address is missing"),
        ('name = "two"', 'name = "one"', "[[host]] name: 'one' occurs twice"),
        ('name = "two"', 'name = "t.w"', "[[host]] 't.w' name: write letters"),
        ('name = "two"', "", "[[host]] number 2 name is missing"),
        ("WORKER_LEGS_MAX = 7", 'PATH = "/tmp"', "[env] PATH: a fleet sets variables that begin with"),
        ("WORKER_LEGS_MAX = 9", "WORKER_LEGS_MAX = [9]", "[[host]] 'two' env WORKER_LEGS_MAX: write a text"),
        ("WORKER_LEGS_MAX = 7", 'BATON_NATS_URL = "x"', "[env] BATON_NATS_URL: Baton sets it itself"),
        ("[nats]", "[nats", "it is not valid TOML"),
        ("[nats]", "nats = 1\n[x]", "'x' is not a key here"),
        ("[nats]\nport = 4333", "nats = 1", "[nats] must be a table"),
    ],
)
def test_an_error_names_table_and_key(before: str, after: str, message: str):
    assert before in FILE
    with pytest.raises(WrongFleetFile) as wrong:
        read_fleet_file(FILE.replace(before, after, 1))

    assert message in str(wrong.value)


def test_the_example_of_the_documentation_is_a_fleet():
    [example] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "operating.md").read_text(), re.DOTALL)

    fleet = read_fleet_file(example)

    assert (fleet.head.name, fleet.head.address) == ("gpu-1", "10.0.0.1")
    assert part_of(fleet, "gpu-2").models[0].gpus_of(Role.DECODE) == 2


def test_an_unknown_host_lists_the_hosts(fleet: Fleet):
    with pytest.raises(WrongFleetFile, match="no host has the name 'three'; name one with --name: one, two"):
        part_of(fleet, "three")


def test_check_shows_every_host_within_80_columns(fleet: Fleet):
    screen = io.StringIO()

    show_fleet(Console(file=screen, width=80, highlight=False, soft_wrap=True), fleet)

    text = screen.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines() == [
        "one  10.0.0.1",
        "  NATS, routers, orchestrator, collector",
        "  API at 10.0.0.1:8080",
        "  one-prefill-1  A",
        "  one-prefill-2  A",
        "two",
        "  GPUs 2,3",
        "  two-decode-1  A",
        "  two-both-1  B",
        "  two-store-1  A",
    ]


def test_the_address_of_the_head_host_can_be_given_later():
    text = FILE.replace('address = "10.0.0.1"\n', "")

    with pytest.raises(WrongFleetFile, match="address is missing"):
        read_fleet_file(text)
    assert [host.address for host in read_fleet_file(text, "10.0.0.9").host] == ["10.0.0.9", ""]


SPANNING = """
[[model]]
name = "A"

[[host]]
name = "one"
address = "10.0.0.1"
workers = [{ role = "prefill", gpus_per_worker = 2 }]

[[host]]
name = "two"
address = "10.0.0.2"
workers = [{ role = "decode", gpus_per_worker = 2, pipeline = 2, count = 2, hosts = ["three"] }]

[[host]]
name = "three"
"""


def test_an_engine_over_several_hosts_has_a_process_on_each():
    fleet = read_fleet_file(SPANNING)

    def of_host(name: str) -> dict[str, list[str]]:
        options = UpOptions(models=part_of(fleet, name).models, host_name=name, state_dir="/s", join=True)
        machine = msgspec.structs.replace(MACHINE, gpus=("0", "1", "2", "3"))
        workers, _notes = plan_workers(options, machine, {}, [])
        keys = ("NODES", "NODE", "HEAD_ADDRESS", "TENSOR_PARALLEL_SIZE", "PIPELINE_PARALLEL_SIZE", "ROLE")
        return {each.name: [each.env.get(f"WORKER_{key}", "") for key in keys] for each in workers}

    assert of_host("one") == {"one-prefill-1": ["", "", "", "2", "", "prefill"]}
    assert of_host("two") == {
        "two-decode-1": ["2", "0", "10.0.0.2:9700", "2", "2", "decode"],
        "two-decode-2": ["2", "0", "10.0.0.2:9701", "2", "2", "decode"],
    }
    assert of_host("three") == {
        "three-decode-1": ["2", "1", "10.0.0.2:9700", "2", "2", "decode"],
        "three-decode-2": ["2", "1", "10.0.0.2:9701", "2", "2", "decode"],
    }


def test_a_group_over_several_hosts_has_workers_on_each_and_whole_experts_where_the_file_says():
    """Wide expert parallelism: each worker has one GPU here, and the experts are shared out over all of a group."""
    row = '{ role = "decode", gpus_per_worker = 2, data_parallel = 4, count = 2, hosts = ["three"] }'
    text = SPANNING.replace('{ role = "decode", gpus_per_worker = 2, pipeline = 2, count = 2, hosts = ["three"] }', row)
    fleet = read_fleet_file(text.replace('name = "A"', 'name = "A"\nengine_args = "--enable-expert-parallel"'))

    def of_host(name: str) -> dict[str, list[str]]:
        options = UpOptions(models=part_of(fleet, name).models, host_name=name, state_dir="/s", join=True)
        machine = msgspec.structs.replace(MACHINE, gpus=tuple(map(str, range(8))))
        workers, _notes = plan_workers(options, machine, {}, [])
        keys = ("NODES", "TENSOR_PARALLEL_SIZE", *(f"DATA_PARALLEL_{key}" for key in ("SIZE", "RANK", "GROUP")))
        assert {each.env["WORKER_ENGINE_ARGS"] for each in workers} == {"--enable-expert-parallel"}
        assert all(each.env.get("WORKER_HEAD_ADDRESS", each.group) == each.group for each in workers)
        return {each.name: [each.env.get(f"WORKER_{key}", "") for key in keys] for each in workers}

    first, second = "10.0.0.2:9700", "10.0.0.2:9701"
    assert of_host("two") == {
        "two-decode-1": ["", "2", "4", "0", first],
        "two-decode-2": ["", "2", "4", "1", first],
        "two-decode-3": ["", "2", "4", "0", second],
        "two-decode-4": ["", "2", "4", "1", second],
    }
    assert of_host("three") == {
        "three-decode-1": ["", "2", "4", "2", first],
        "three-decode-2": ["", "2", "4", "3", first],
        "three-decode-3": ["", "2", "4", "2", second],
        "three-decode-4": ["", "2", "4", "3", second],
    }


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ('["three"]', '["tree"]', "hosts: 'tree' is not a host of this file; did you mean 'three'?"),
        ('["three"]', '["three", "two"]', "name each further host once, and not 'two' itself"),
        ('["three"]', '["three", "three"]', "name each further host once"),
        ('address = "10.0.0.2"\n', "", "the others meet 'two' at its address"),
        ('"10.0.0.2"', '"two.local"', "the others meet 'two' at its address"),
        ("count = 2", "data_parallel = 3", "3 workers of a group cannot be shared out equally over 2 hosts"),
        ('role = "decode"', 'role = "store"', "hosts: only engines have ranks on several hosts"),
        (
            'role = "decode", gpus_per_worker = 2, pipeline = 2, count = 2, hosts = ["three"]',
            'role = "prefill", hosts = ["one"]',
            "role 'prefill' occurs twice for one model",
        ),
        (
            'name = "three"',
            'name = "three"\nworkers = [{ role = "decode" }]',
            "role 'decode' occurs twice for one model",
        ),
    ],
)
def test_an_engine_over_several_hosts_that_cannot_be_is_refused(before: str, after: str, why: str):
    assert before in SPANNING
    with pytest.raises(WrongFleetFile, match=re.escape(why)):
        read_fleet_file(SPANNING.replace(before, after, 1))
