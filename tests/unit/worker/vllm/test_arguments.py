"""Arguments and environment for vLLM; needs no vLLM."""

from __future__ import annotations

import json
import os
import re
import socket
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from connector.layout.engine_layout import UnsupportedEngine
from connector.messages import read_settings
from services.worker.engines.port import Identity
from services.worker.engines.vllm.arguments import (
    OWN_EVENT_PUBLISHER,
    arguments,
    bindings_of,
    configure_connector,
    engine_threads,
    free_port,
    import_defaults,
    parse_cores,
    refuse_other_connectors,
    refuse_unsupported,
    untested,
)
from services.worker.settings import Settings
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import Role
from shared.runtime.settings import CommonSettings, SettingsError, load
from tests.support.fleet_builders import FINGERPRINT


def line(settings: Settings, *, on_cpu: bool = True, otlp_endpoint: str = "") -> list[str]:
    return arguments(settings, "/models/m", on_cpu=on_cpu, events=("ipc://a", "ipc://b"), otlp_endpoint=otlp_endpoint)


def value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_operators_own_arguments_come_last_and_win():
    typed = line(Settings(engine_args="--dtype bfloat16 --max-num-seqs 8"))

    assert typed[-4:] == ["--dtype", "bfloat16", "--max-num-seqs", "8"]


def test_failed_reads_are_recomputed_and_hashes_are_reproducible():
    typed = line(Settings())

    assert json.loads(value(typed, "--kv-transfer-config"))["kv_load_failure_policy"] == "recompute"
    assert value(typed, "--prefix-caching-hash-algo") == "sha256_cbor"
    assert value(typed, "--block-size") == "32"


def test_engines_fetch_media_from_named_hosts_only():
    """An empty list would be every host to vLLM; no host has a name with a colon."""
    none = line(Settings())
    some = arguments(
        Settings(),
        "m",
        on_cpu=True,
        events=("", ""),
        otlp_endpoint="",
        media_hosts=CommonSettings(media_domains="b.example, A.example").media_hosts,
    )

    assert ":" in value(none, "--allowed-media-domains")
    at = some.index("--allowed-media-domains")
    assert some[at + 1 : at + 3] == ["a.example", "b.example"]
    assert "--allowed-local-media-path" not in none + some


def test_vllm_chooses_the_block_size_on_a_gpu():
    assert "--block-size" not in line(Settings(), on_cpu=False)
    assert value(line(Settings(block_size=64), on_cpu=False), "--block-size") == "64"
    assert value(line(Settings(block_size=64)), "--block-size") == "64"


def transfer(settings: Settings) -> dict:
    return json.loads(value(line(settings), "--kv-transfer-config"))


def test_the_exchange_moves_kv_by_default():
    assert transfer(Settings())["kv_connector"] == "BatonConnector"
    upstream = transfer(Settings(connector="upstream", kv_lease_s=20.0))
    assert upstream["kv_connector"] == "NixlConnector"
    assert upstream["kv_connector_extra_config"]["kv_lease_duration"] == 20


def resolved(settings: Settings, *, async_scheduling: bool) -> SimpleNamespace:
    """What ``configure_connector`` looks at of vLLM's configuration."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector=transfer(settings)["kv_connector"], kv_connector_extra_config={}
        ),
        scheduler_config=SimpleNamespace(async_scheduling=async_scheduling, scheduler_cls=None),
        kv_events_config=SimpleNamespace(publisher="zmq"),
        parallel_config=parallel(),
        lora_config=None,
        device_config=SimpleNamespace(device_type="cuda"),
    )


def parallel(**differs: Any) -> SimpleNamespace:
    """Of an engine without data parallel, unless it differs."""
    plain = {
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "data_parallel_external_lb": False,
        "data_parallel_master_ip": "127.0.0.1",
        "data_parallel_backend": "mp",
        "enable_elastic_ep": False,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enable_expert_parallel": False,
        "all2all_backend": "allgather_reducescatter",
    }
    return SimpleNamespace(**{**plain, **differs})


def on_cpu(kv_type: str = "auto", *, use_mla: bool = False, **text: Any) -> SimpleNamespace:
    """What vLLM's configuration says of a model on a CPU."""
    config = resolved(Settings(connector="upstream"), async_scheduling=False)
    config.device_config = SimpleNamespace(device_type="cpu")
    config.cache_config = SimpleNamespace(cache_dtype=kv_type, block_size=32)
    config.model_config = SimpleNamespace(
        architecture="SomeForCausalLM",
        is_moe=False,
        use_mla=use_mla,
        hf_text_config=SimpleNamespace(**text),
        dtype="float32",
        get_head_size=lambda: 48,
    )
    return config


def introduced(
    settings: Settings, *, async_scheduling: bool = False, config: SimpleNamespace | None = None
) -> SimpleNamespace:
    config = config or resolved(settings, async_scheduling=async_scheduling)
    identity, refusal_file = Identity(WorkerId("w1"), Epoch(7)), Path("/run/refused")
    configure_connector(
        config,
        settings,
        identity,
        notifications="ipc://n",
        grant_socket="/run/kv-grants-1",
        fingerprint=FINGERPRINT,
        refusal_file=refusal_file,
    )
    return config


def test_the_connector_gets_the_workers_identity():
    config = introduced(Settings(kv_lease_s=20.0))

    told = read_settings(config.kv_transfer_config.kv_connector_extra_config)
    assert (told.worker_id, told.epoch, told.notifications) == ("w1", 7, "ipc://n")
    assert told.fingerprint_key(64) == msgspec.structs.replace(FINGERPRINT, block_size=64).key()
    assert told.grant_socket == "/run/kv-grants-1"
    assert told.lease_s == 20.0
    assert told.refusal_file == "/run/refused"
    assert told.copy_cores == sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(("ahead", "name"), [(False, "BatonScheduler"), (True, "BatonAsyncScheduler")])
def test_the_scheduler_is_async_if_vllm_decided_so(ahead, name):
    assert (
        introduced(Settings(), async_scheduling=ahead).scheduler_config.scheduler_cls
        == f"connector.scheduler.engine_scheduler.{name}"
    )


@pytest.mark.parametrize(("asked", "publisher"), [("zmq", OWN_EVENT_PUBLISHER), ("null", "null")])
def test_kv_events_are_published_by_batons_publisher_if_at_all(asked, publisher):
    config = resolved(Settings(), async_scheduling=False)
    config.kv_events_config.publisher = asked

    assert introduced(Settings(), config=config).kv_events_config.publisher == publisher


def test_vllms_own_connector_gets_vllms_own_scheduler_and_publisher():
    config = introduced(Settings(connector="upstream"))

    assert config.scheduler_config.scheduler_cls is None
    assert config.kv_events_config.publisher == "zmq"
    assert config.kv_transfer_config.kv_connector_extra_config == {}


@pytest.mark.parametrize(
    ("name", "children", "told"),
    [
        ("MultiConnector", ["BatonConnector", "OffloadingConnector"], "MultiConnector of BatonConnector, Offloading"),
        ("MultiConnector", ["LMCacheConnectorV1", "BatonConnector"], "MultiConnector of LMCacheConnectorV1, Baton"),
        ("LMCacheConnectorV1", [], "kv_connector is LMCacheConnectorV1, by vLLM's own argument --kv-transfer-config"),
    ],
)
def test_other_connectors_are_refused_by_name(name: str, children: list[str], told: str):
    extra = {"connectors": [{"kv_connector": child} for child in children]} if children else {}
    typed = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)

    with pytest.raises(UnsupportedEngine, match=re.escape(told)) as refused:
        refuse_other_connectors(typed, Settings())
    assert "baton up --host-memory" in str(refused.value)
    refuse_other_connectors(typed, Settings(connector="upstream"))
    refuse_other_connectors(SimpleNamespace(kv_connector="BatonConnector"), Settings())


@pytest.mark.parametrize("connector", ["baton", "upstream"])
def test_ranks_that_are_no_workers_are_refused_by_name(connector):
    config = resolved(Settings(connector=connector), async_scheduling=False)
    config.parallel_config = parallel(data_parallel_size=2)

    with pytest.raises(UnsupportedEngine, match=r"data_parallel_size is 2, by vLLM's own .*baton up --data-parallel N"):
        refuse_unsupported(config, Settings(connector=connector))


SECOND_OF_TWO = Settings(data_parallel_size=2, data_parallel_rank=1, data_parallel_group="g", data_parallel_port=29_777)
RANK_1 = {"data_parallel_size": 2, "data_parallel_index": 1, "data_parallel_external_lb": True}


def test_a_rank_of_a_group_has_a_front_end_of_its_own():
    typed = arguments(SECOND_OF_TWO, "m", on_cpu=True, events=("", ""), otlp_endpoint="")
    chosen = dict(pairwise(typed))
    options = [f"--data-parallel-{name}" for name in ("size", "rank", "address", "rpc-port")]
    config = resolved(Settings(connector="upstream"), async_scheduling=False)
    config.parallel_config = parallel(**RANK_1)

    assert [chosen[option] for option in options] == ["2", "1", "127.0.0.1", "29777"]
    refuse_unsupported(config, SECOND_OF_TWO)


@pytest.mark.parametrize(
    ("differs", "why"),
    [
        ({"data_parallel_index": 0}, "by vLLM's own arguments"),
        ({"data_parallel_external_lb": False}, "internal and hybrid load balancer"),
        ({"data_parallel_master_ip": "10.0.0.7"}, r"data_parallel_address is 10\.0\.0\.7, .* at 127"),
        ({"data_parallel_backend": "ray"}, "data_parallel_backend is ray"),
        ({"enable_elastic_ep": True}, "enable_elastic_ep is True"),
    ],
)
def test_what_a_group_cannot_have_is_refused_by_name(differs: dict[str, Any], why: str):
    config = resolved(SECOND_OF_TWO, async_scheduling=False)
    config.parallel_config = parallel(**{**RANK_1, **differs})

    with pytest.raises(UnsupportedEngine, match=why):
        refuse_unsupported(config, SECOND_OF_TWO)


def test_a_wide_group_gets_its_arguments_and_the_log_says_what_is_untested():
    """Sixteen workers, each with whole experts, whose tokens DeepEP's kernels exchange."""
    deep = "--enable-expert-parallel --all2all-backend deepep_low_latency"
    wide = msgspec.structs.replace(
        SECOND_OF_TWO, data_parallel_size=16, data_parallel_rank=9, head_address="10.0.0.7:9700", engine_args=deep
    )
    typed = arguments(wide, "m", on_cpu=False, events=("", ""), otlp_endpoint="")
    config = resolved(Settings(connector="upstream"), async_scheduling=False)
    config.device_config = SimpleNamespace(device_type="cuda")
    config.parallel_config = parallel(
        data_parallel_size=16,
        data_parallel_index=9,
        data_parallel_external_lb=True,
        data_parallel_master_ip="10.0.0.7",
        enable_expert_parallel=True,
        all2all_backend="deepep_low_latency",
    )

    assert typed[-3:] == deep.split()
    assert dict(pairwise(typed))["--data-parallel-rank"] == "9"
    refuse_unsupported(config, wide)
    assert untested(config) == [
        "a data parallel group on GPUs",
        "16 workers in a group",
        "whole experts for each worker, exchanging tokens by deepep_low_latency",
    ]
    config.parallel_config = parallel()
    assert untested(config) == []


def test_the_engines_of_a_group_over_several_hosts_find_each_other_at_rank_0():
    over_hosts = msgspec.structs.replace(SECOND_OF_TWO, head_address="10.0.0.7:9700")
    chosen = dict(pairwise(arguments(over_hosts, "m", on_cpu=False, events=("", ""), otlp_endpoint="")))
    config = resolved(Settings(connector="upstream"), async_scheduling=False)
    config.parallel_config = parallel(**RANK_1, data_parallel_master_ip="10.0.0.7")

    assert chosen["--data-parallel-address"] == "10.0.0.7"
    assert "--nnodes" not in chosen
    refuse_unsupported(config, over_hosts)
    with pytest.raises(ValueError, match="WORKER_HEAD_ADDRESS: 'there' is no address and port"):
        msgspec.structs.replace(SECOND_OF_TWO, head_address="there")


@pytest.mark.parametrize(
    ("differs", "why"),
    [
        ({"data_parallel_rank": 2}, "the group has 2 ranks, of which the first is 0"),
        ({"data_parallel_group": ""}, "give all workers of the group the same name"),
        ({"data_parallel_size": 1}, "WORKER_DATA_PARALLEL_SIZE: it is 1"),
        ({"engine": "simulated"}, "only vLLM engines"),
        ({"connector": "upstream"}, "WORKER_CONNECTOR"),
        ({"asleep": True}, "WORKER_ASLEEP"),
        ({"weights_dir": "/w"}, "WORKER_WEIGHTS_DIR"),
        ({"role": Role.STORE}, "WORKER_ROLE"),
    ],
)
def test_settings_that_a_group_cannot_have_stop_the_worker_at_once(differs: dict[str, Any], why: str):
    with pytest.raises(ValueError, match=why):
        msgspec.structs.replace(SECOND_OF_TWO, **differs)


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 2), ("cpu", 1), ("cuda", 2)])
def test_whole_experts_of_each_rank_are_refused_on_a_cpu(device: str, ranks: int):
    config = on_cpu()
    config.device_config = SimpleNamespace(device_type=device)
    config.model_config.is_moe = True
    config.parallel_config = parallel(tensor_parallel_size=ranks, enable_expert_parallel=True)

    if device == "cpu" and ranks > 1:
        with pytest.raises(UnsupportedEngine, match=r"enable_expert_parallel is set, .* leave it out on a CPU"):
            refuse_unsupported(config, Settings())
    else:
        refuse_unsupported(config, Settings())


@pytest.mark.parametrize(("has_state", "drafts"), [(True, True), (True, False), (False, True)])
def test_drafts_of_a_model_with_a_state_are_refused_before_it_is_loaded(has_state: bool, drafts: bool):
    """Until ``tests/gpu/test_state_with_drafts.py`` passes on a GPU."""
    config = resolved(Settings(), async_scheduling=False)
    config.parallel_config = parallel(prefill_context_parallel_size=1, decode_context_parallel_size=1)
    config.cache_config = SimpleNamespace(enable_prefix_caching=True)
    config.speculative_config = SimpleNamespace(method="mtp") if drafts else None
    config.model_config = SimpleNamespace(
        architecture="Qwen3NextForCausalLM", is_hybrid=has_state, use_mla=False, get_total_num_kv_heads=lambda: 4
    )

    if has_state and drafts:
        why = r"Qwen3NextForCausalLM has layers with a state, .* leave out --speculative-config"
        with pytest.raises(UnsupportedEngine, match=why):
            refuse_unsupported(config, Settings())
    else:
        refuse_unsupported(config, Settings())


@pytest.mark.parametrize(("device", "is_moe"), [("cpu", True), ("cpu", False), ("cuda", True)])
def test_adapters_of_a_model_with_experts_are_refused_on_a_cpu(device, is_moe):
    config = on_cpu()
    config.lora_config = SimpleNamespace(default_mm_loras=None)
    config.device_config = SimpleNamespace(device_type=device)
    config.model_config.architecture, config.model_config.is_moe = "Qwen3MoeForCausalLM", is_moe

    if device == "cpu" and is_moe:
        with pytest.raises(UnsupportedEngine, match=r"Qwen3MoeForCausalLM has experts.* without adapters on a CPU"):
            refuse_unsupported(config, Settings())
    else:
        refuse_unsupported(config, Settings())


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (on_cpu(index_topk=2048), "SomeForCausalLM has sparse attention, .* run this model on a GPU"),
        (
            on_cpu("int8_per_token_head"),
            "kv_cache_dtype is int8_per_token_head, .* set --kv-cache-dtype to auto or fp8",
        ),
        (on_cpu("fp8", use_mla=True), "kv_cache_dtype is fp8, .* set --kv-cache-dtype to auto"),
        (on_cpu("fp8"), "kv_cache_dtype is fp8, but FP8 KV cache requires head_size divisible by 32"),
    ],
    ids=["sparse", "per-token-head", "mla-fp8", "fp8-heads"],
)
def test_what_vllm_cannot_compute_on_a_cpu_is_refused_by_name(config, why):
    pytest.importorskip("vllm")
    with pytest.raises(UnsupportedEngine, match=why):
        refuse_unsupported(config, Settings())

    config.device_config.device_type = "cuda"
    refuse_unsupported(config, Settings())


def test_a_threshold_above_1_stops_the_start():
    with pytest.raises(SettingsError, match="WORKER_CACHE_HIT_THRESHOLD"):
        load(Settings, "WORKER_", {"WORKER_CACHE_HIT_THRESHOLD": "1.5"})


@pytest.mark.parametrize("other", [{"WORKER_CONNECTOR": "upstream"}, {"WORKER_ENGINE": "attached"}], ids=str)
def test_a_threshold_that_the_engine_cannot_keep_stops_the_start(other):
    threshold = {"WORKER_CACHE_HIT_THRESHOLD": "0.8"}

    with pytest.raises(SettingsError, match=r"WORKER_CACHE_HIT_THRESHOLD: .* unset it"):
        load(Settings, "WORKER_", {**other, **threshold})
    for fine in ({**threshold, "WORKER_ENGINE": "simulated", "WORKER_CONNECTOR": "upstream"}, other, threshold):
        load(Settings, "WORKER_", fine)


def test_a_gpu_keeps_vllms_own_choices():
    typed = line(Settings(), on_cpu=False)

    for name in ("--enforce-eager", "--dtype", "--distributed-executor-backend", "--kv-cache-memory-bytes"):
        assert name not in typed


def test_tracing_needs_an_endpoint():
    assert "--otlp-traces-endpoint" not in line(Settings())
    assert (
        value(line(Settings(), otlp_endpoint="http://h:4318/"), "--otlp-traces-endpoint") == "http://h:4318/v1/traces"
    )


def test_cores_are_numbers_and_ranges():
    assert parse_cores("0,2-4") == [0, 2, 3, 4]
    assert parse_cores("") == sorted(os.sched_getaffinity(0))
    with pytest.raises(ValueError):
        parse_cores("first")


@pytest.mark.parametrize("parts", [1, 2, 3, 64])
def test_parts_of_the_cores_are_disjoint_unless_there_are_fewer_cores(parts: int):
    usable = sorted(os.sched_getaffinity(0))

    found = [parse_cores(f"{part}/{parts}") for part in range(1, parts + 1)]

    assert all(found)
    assert sorted({core for cores in found for core in cores}) == usable
    if parts <= len(usable):
        assert [core for cores in found for core in cores] == usable


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/0", "1/2/3", "/2"])
def test_a_part_that_does_not_exist_is_refused(text: str):
    with pytest.raises(ValueError):
        parse_cores(text)


def test_the_engines_threads_are_set_up_for_its_process_only():
    before = dict(os.environ)

    with engine_threads(bindings_of([2, 3], 1, apart=False)):
        assert os.environ["OMP_NUM_THREADS"] == "2"
        assert os.environ["OMP_PLACES"] == "{2},{3}"

    assert dict(os.environ) == before


def test_a_model_has_its_primary_name_and_its_aliases():
    typed = line(Settings(model="org/m", aliases="chat, fast,chat"))

    at = typed.index("--served-model-name")
    assert typed[at + 1 : at + 5] == ["org/m", "chat", "fast", "--allowed-media-domains"]
    for wrong in ("a b", "-x", "a,,b"):
        with pytest.raises(SettingsError, match="WORKER_ALIASES"):
            load(Settings, "WORKER_", {"WORKER_ALIASES": wrong})


def test_stages_and_their_ranks_are_vllms_options():
    settings = Settings(worker_id="w", tensor_parallel_size=2, pipeline_parallel_size=3)
    typed = arguments(settings, "m", on_cpu=True, events=("", ""), otlp_endpoint="")

    assert settings.ranks == 6
    chosen = dict(pairwise(typed))
    options = ("--tensor-parallel-size", "--pipeline-parallel-size", "--distributed-executor-backend")
    assert [chosen[option] for option in options] == ["2", "3", "mp"]


def test_ranks_divide_the_cores_equally():
    assert bindings_of([0, 1, 2, 5, 6], 2, apart=True) == {"VLLM_CPU_OMP_THREADS_BIND": "0,1|2,5"}
    with pytest.raises(ValueError, match=r"The engine has 3 ranks .* but 2 CPU cores"):
        bindings_of([0, 1], 3, apart=True)


def test_ranks_of_a_cpu_engine_run_in_processes_of_their_own():
    typed = line(Settings(tensor_parallel_size=2))

    assert value(typed, "--tensor-parallel-size") == "2"
    assert value(typed, "--distributed-executor-backend") == "mp"
    assert "--distributed-executor-backend" not in line(Settings(tensor_parallel_size=2), on_cpu=False)
    assert "--tensor-parallel-size" not in line(Settings())


def test_a_taken_port_is_not_chosen():
    with socket.socket() as taken:
        port = free_port("127.0.0.1")
        taken.bind(("127.0.0.1", port))

        assert free_port("127.0.0.1") != port


def test_a_foreign_address_is_refused_with_advice():
    with pytest.raises(OSError, match="WORKER_KV_HOST"):
        free_port("192.0.2.1")


@pytest.mark.parametrize(("rank_host", "device"), [("127.0.0.1", "lo"), ("", None)])
def test_ranks_on_one_host_meet_on_loopback(rank_host: str, device: str | None):
    """Gloo would listen on the address that the host's name has, NCCL on a network card."""
    made = import_defaults("127.0.0.1", model_is_local=True, rank_host=rank_host)

    assert [made.get(f"{name}_SOCKET_IFNAME") for name in ("GLOO", "NCCL")] == [device] * 2
    assert made.get("VLLM_HOST_IP") == (rank_host or None)


def test_an_address_of_another_host_is_refused_with_the_settings_to_look_at():
    with pytest.raises(OSError, match=r"no network device here has 192\.0\.2\.1: set WORKER_KV_HOST"):
        import_defaults("127.0.0.1", model_is_local=True, rank_host="192.0.2.1")


def test_the_hosts_of_an_engine_are_arguments():
    made = dict(pairwise(arguments(of_two_hosts(), "m", on_cpu=True, events=("e", "r"), otlp_endpoint="", port=55)))

    named = ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--distributed-executor-backend")
    assert [made[name] for name in named] == ["2", "1", "10.0.0.1", "55", "mp"]
    assert "--nnodes" not in arguments(Settings(), "m", on_cpu=True, events=("e", "r"), otlp_endpoint="")


def of_two_hosts() -> Settings:
    return Settings(nodes=2, node=1, pipeline_parallel_size=2, head_address="10.0.0.1:9700")
