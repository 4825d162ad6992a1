"""Which cores and GPUs each worker gets; near GPUs together, as tables of `nvidia-smi topo -m` show them.

The tables are those that owners of such machines have published: two cards on one socket, a DGX-1 (each GPU has NVLinks to four
others), eight cards in pairs behind PCIe switches on two sockets.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.launcher.system.devices import FAR, engines_for, nearest, parse_topology, share_cores, share_gpus
from services.launcher.system.process_plan import Machine, PlanRefused

EIGHT = tuple("01234567")
MACHINE = Machine(python="python", nats_server="nats-server", cores=(0, 1))


def table(name: str) -> str:
    return (Path(__file__).with_name("topologies") / f"{name}.txt").read_text()


def gpus_of(name: str, *counts: int, used: tuple[str, ...] = ()) -> list[str]:
    machine = msgspec.structs.replace(MACHINE, gpus=EIGHT, gpus_used=used, gpu_topology=table(name))
    devices, notes = share_gpus(machine, counts, running=len(used))
    assert notes == []
    return [device.env["CUDA_VISIBLE_DEVICES"] for device in devices]


def test_the_table_gives_the_distance_of_each_two_gpus():
    cards = parse_topology(table("two_cards"))
    assert cards == {("0", "0"): 0, ("0", "1"): 400, ("1", "0"): 400, ("1", "1"): 0}

    dgx = parse_topology(table("dgx1"))
    assert len(dgx) == 64
    assert dgx["0", "3"] < dgx["0", "1"] < cards["0", "1"] < dgx["0", "5"] < FAR

    sockets = parse_topology(table("eight_on_two_sockets"))
    assert [sockets["0", other] for other in EIGHT] == [0, 200, 400, 400, 600, 600, 600, 600]


@pytest.mark.parametrize(
    "text", ["", "\n\n", "NVIDIA-SMI has failed", "GPU0\tGPU1\nGPU0", "X\nGPU7 X SYS", "\tGPU0\n\tGPU0\tX"]
)
def test_other_output_is_no_topology(text: str):
    assert parse_topology(text) in ({}, {("0", "0"): 0})
    assert nearest(EIGHT, 3, parse_topology(text)) == ("0", "1", "2")


@pytest.mark.parametrize(
    ("name", "counts", "gpus"),
    [
        ("eight_on_two_sockets", (2, 2, 4), ["4,5", "6,7", "0,1,2,3"]),
        ("eight_on_two_sockets", (1, 2, 1), ["2", "0,1", "3"]),
        ("eight_on_two_sockets", (8,), ["0,1,2,3,4,5,6,7"]),
        ("dgx1", (2, 2), ["0,3", "1,2"]),
        ("dgx1", (4, 4), ["0,1,2,3", "4,5,6,7"]),
    ],
)
def test_each_worker_gets_gpus_that_are_near_each_other(name: str, counts: tuple[int, ...], gpus: list[str]):
    assert gpus_of(name, *counts) == gpus


def test_gpus_of_running_workers_stay_theirs():
    assert gpus_of("eight_on_two_sockets", 2, used=("0", "2", "3")) == ["4,5"]
    assert gpus_of("eight_on_two_sockets", 1, used=("0", "1")) == ["2"]


def test_an_engine_with_several_gpus_is_told_and_ordered_as_nvidia_smi_orders():
    machine = msgspec.structs.replace(MACHINE, gpus=("0", "1"), gpu_topology=table("two_cards"))
    [device], _notes = share_gpus(machine, [2], 0)

    assert device.env == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "WORKER_TENSOR_PARALLEL_SIZE": "2",
    }
    assert device.text == "GPUs 0,1"


@pytest.mark.parametrize(
    ("counts", "used", "text"),
    [
        ((4, 4, 1), (), r"9 GPUs are wanted \(workers: 2 with 4 and 1 with 1\), but there are 8\."),
        ((2,), EIGHT[1:], r"2 GPUs are wanted .*but there are 8, of which running workers use 7\."),
    ],
)
def test_too_few_gpus_are_counted_in_the_refusal(counts: tuple[int, ...], used: tuple[str, ...], text: str):
    machine = msgspec.structs.replace(MACHINE, gpus=EIGHT, gpus_used=used)

    with pytest.raises(PlanRefused, match=text):
        share_gpus(machine, counts, len(used))


def test_engines_of_one_gpu_share_when_there_are_too_few():
    machine = msgspec.structs.replace(MACHINE, gpus=("0", "1"), gpus_used=("0", "1"))
    devices, notes = share_gpus(machine, [1], running=2)

    assert devices[0].env["CUDA_VISIBLE_DEVICES"] == "0"
    assert devices[0].engine_args == "--gpu-memory-utilization 0.45"
    assert notes == ["3 engines share 2 GPU(s): each may take 45% of a GPU's memory."]


def cores_of(cores: int, *ranks: int, running: int = 0) -> list[str]:
    devices, _notes = share_cores(range(cores), ranks, running)
    return [device.env["WORKER_CPU_CORES"] for device in devices]


def test_each_rank_gets_equally_many_cores():
    assert cores_of(9, 2, 1) == ["1,2,3,4", "5,6,7"]  # Core 0 is left to the services; a single rank takes the rest.
    assert cores_of(3, 2, 1) == ["0,1", "2"]
    assert cores_of(2, 2) == ["0,1"]


def test_engines_share_cores_but_ranks_of_one_engine_do_not():
    assert cores_of(2, 2, 1) == ["0,1", "0"]
    assert cores_of(2, 2, running=1) == ["1,0"]
    with pytest.raises(PlanRefused, match="with 3 ranks needs as many cores, but there are 2"):
        share_cores((0, 1), [3], 0)


def test_ranks_that_share_cores_are_said_to_hold_up_the_engines_beside_them():
    for ranks, running in (([1, 2], 0), ([2], 1)):
        assert any("keeps its core busy" in note for note in share_cores((0, 1), ranks, running)[1])
    for ranks, cores in (([1, 1, 1], 2), ([1, 2], 3)):
        assert not any("core busy" in note for note in share_cores(range(cores), ranks, 0)[1])


def test_only_engines_with_several_ranks_are_told_their_number():
    (two, one), _notes = share_cores(range(3), [2, 1], 0)

    assert two.env["WORKER_TENSOR_PARALLEL_SIZE"] == "2"
    assert "WORKER_TENSOR_PARALLEL_SIZE" not in one.env


TWO_SOCKETS = {core: f"node{core // 4}" for core in range(8)}


def test_engines_on_two_nodes_have_one_each():
    devices, notes = share_cores(range(8), [1, 1], 0, TWO_SOCKETS)
    assert [device.env["WORKER_CPU_CORES"] for device in devices] == ["1,2,3", "5,6,7"]
    assert notes == []

    devices, _notes = share_cores(range(8), [1, 1, 1, 1], 0, TWO_SOCKETS)
    assert [device.env["WORKER_CPU_CORES"] for device in devices] == ["1,2", "3", "5,6", "7"]


@pytest.mark.parametrize("ranks", [[1], [1, 1, 1], [2, 1], [5, 1]])
def test_engines_that_do_not_fit_the_nodes_share_all_cores(ranks: list[int]):
    assert share_cores(range(8), ranks, 0, TWO_SOCKETS) == share_cores(range(8), ranks, 0)


@pytest.mark.parametrize(
    ("cores", "nodes", "gpus", "used", "ranks", "engines"),
    [
        (2, {}, (), (), 1, 1),
        (64, {}, (), (), 1, 1),
        (8, TWO_SOCKETS, (), (), 1, 2),
        (8, TWO_SOCKETS, (), (), 2, 2),
        (8, TWO_SOCKETS, EIGHT, (), 1, 8),
        (8, {}, EIGHT, (), 2, 4),
        (8, {}, EIGHT, EIGHT[:3], 2, 2),
        (8, {}, ("0",), (), 2, 1),
        (8, {}, EIGHT, EIGHT, 1, 1),
    ],
)
def test_a_machine_serves_most_with_an_engine_for_each_memory(
    cores: int, nodes: dict[int, str], gpus: tuple[str, ...], used: tuple[str, ...], ranks: int, engines: int
):
    machine = msgspec.structs.replace(MACHINE, cores=tuple(range(cores)), nodes=nodes, gpus=gpus, gpus_used=used)

    assert engines_for(machine, ranks) == engines
