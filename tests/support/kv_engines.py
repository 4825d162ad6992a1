"""Engines without a model: each rank's KV memory, filled so that every number encodes its position."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np

from connector.layout.routes import ReaderRank
from connector.layout.tensors import PROTOCOL_VERSION, CacheTensor, heads_of, layer_of
from connector.transfer.agent import Region, TransferAgent
from connector.worker.connections import PROBE_BYTES, Own
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvGroup, KvGroupKind, KvHandshake, KvRank


@dataclass(frozen=True)
class Shape:
    """Shape of an engine's KV cache. Two engines must agree in all but ``ranks``, ``cut``, ``blocks`` and ``dims``."""

    ranks: int = 1
    """Of each pipeline stage."""
    blocks: int = 16
    kv_heads: int = 4
    layers: int = 3
    block_size: int = 8
    first_layer: int = 0
    """Number in the name of the first layer."""
    groups: int = 1
    """KV cache groups, among which the layers take turns."""
    content: int = 16
    dims: str = "BHNC"
    """Dimensions of each layer's tensor, outermost first; with L, of the one tensor in which all layers are."""
    kernel_blocks: int = 1
    """Kernel blocks in each block."""
    cut: int = 0
    """Layers of the first of two pipeline stages; 0: there is one stage."""

    @property
    def layer_dims(self) -> str:
        return self.dims.replace("L", "")

    @property
    def stages(self) -> list[range]:
        """The layers of each stage."""
        return [range(self.cut), range(self.cut, self.layers)] if 0 < self.cut < self.layers else [range(self.layers)]

    def heads(self, rank: int) -> range:
        return heads_of(rank, self.ranks, self.kv_heads)

    def sizes(self, rank: int, layers: int) -> dict[str, int]:
        return {
            "L": layers, "K": 2, "B": self.blocks * self.kernel_blocks, "H": len(self.heads(rank)),
            "N": self.block_size // self.kernel_blocks, "C": self.content,
        }  # fmt: skip


@dataclass
class RankMemory:
    """One rank's layers as numpy arrays of 32-bit numbers."""

    shape: Shape
    rank: int
    stage: int = 0
    arrays: list[np.ndarray] = field(default_factory=list)
    layers: list[np.ndarray] = field(default_factory=list)
    """Each a view of an array, which is its own or all layers'."""

    def __post_init__(self) -> None:
        layers, dims = len(self.numbers), self.shape.dims
        sizes, arrays = self.shape.sizes(self.rank, layers), 1 if "L" in dims else layers
        self.arrays = [np.zeros([sizes[dim] for dim in dims], dtype=np.uint32) for _ in range(arrays)]
        self.layers = list(np.moveaxis(self.arrays[0], dims.index("L"), 0)) if "L" in dims else self.arrays

    @property
    def numbers(self) -> range:
        """Of its layers among all of the model."""
        return self.shape.stages[self.stage]

    def canonical(self, layer: int) -> np.ndarray:
        """The same memory with the dimensions K, B, H, N, C."""
        array = self.layers[layer]
        dims = self.shape.layer_dims
        for missing in (dim for dim in "KBHNC" if dim not in dims):
            array, dims = array[np.newaxis], missing + dims
        return array.transpose([dims.index(dim) for dim in "KBHNC"])

    def fill(self) -> None:
        """Set each number to the encoding of its layer, plane, block, head of the model, token and content."""
        for layer, number in enumerate(self.numbers):
            view = self.canonical(layer)
            view[...] = expected(self.shape, number, self.rank, range(self.shape.blocks))

    def block(self, layer: int, block: int) -> np.ndarray:
        """K, kernel block, H, N, C."""
        each = self.shape.kernel_blocks
        return self.canonical(layer)[:, block * each : (block + 1) * each]

    def described(self, agent: bytes = b"") -> KvRank:
        tensors = [
            CacheTensor(
                f"layers.{number}",
                number % self.shape.groups,
                array.ctypes.data,
                self.shape.layer_dims,
                array.shape,
                array.strides,
                array.itemsize,
            )
            for number, array in enumerate(self.layers, start=self.shape.first_layer + self.numbers.start)
        ]
        layers = [layer_of(tensor, self.shape.blocks, self.shape.kv_heads) for tensor in tensors]
        return KvRank(rank=self.rank, agent=agent, device="cpu", device_id=0, layers=layers, stage=self.stage)

    def regions(self) -> list[Region]:
        return [Region(array.ctypes.data, array.nbytes, "cpu", 0) for array in self.arrays]


def expected(shape: Shape, layer: int, rank: int, blocks: range | list[int]) -> np.ndarray:
    """Expected content of these blocks on a rank, with the dimensions K, B, H, N, C."""
    each, tokens = shape.kernel_blocks, shape.block_size // shape.kernel_blocks
    kernel = np.array([block * each + one for block in blocks for one in range(each)], dtype=np.uint32)
    sides = 2 if "K" in shape.dims else 1
    numbers = np.zeros((sides, len(kernel), len(shape.heads(rank)), tokens, shape.content), dtype=np.uint32)
    numbers += np.arange(sides, dtype=np.uint32)[:, None, None, None, None] << 28
    numbers += np.uint32(layer + 1) << 23
    numbers += kernel[None, :, None, None, None] * np.uint32(4096)
    numbers += np.array(shape.heads(rank), dtype=np.uint32)[None, None, :, None, None] * np.uint32(256)
    inner = np.arange(tokens * shape.content, dtype=np.uint32).reshape(tokens, shape.content)
    return numbers + inner * np.uint32(2654435761)


def memories(shape: Shape) -> list[RankMemory]:
    """Of all ranks of all stages."""
    return [RankMemory(shape, rank, stage) for stage in range(len(shape.stages)) for rank in range(shape.ranks)]


def handshake(ranks: list[KvRank], shape: Shape, worker_id: str = "holder", epoch: int = 1) -> KvHandshake:
    return KvHandshake(
        worker_id=WorkerId(worker_id),
        epoch=Epoch(epoch),
        version=PROTOCOL_VERSION,
        fingerprint="model",
        clock_s=0.0,
        hash_block_size=shape.block_size,
        alignment=shape.block_size,
        groups=[KvGroup(kind=KvGroupKind.FULL, block_size=shape.block_size)] * shape.groups,
        blocks=shape.blocks,
        ranks=ranks,
    )


@dataclass
class ReadingRank:
    """A rank's memory and its scratch buffer, from which ``own`` makes a Copier's arguments."""

    memory: RankMemory
    scratch: np.ndarray = field(default_factory=lambda: np.zeros(PROBE_BYTES, dtype=np.uint8))

    def own(self, agent: TransferAgent) -> Own:
        """Registers the memory with the agent."""
        shape = self.memory.shape
        agent.register([*self.memory.regions(), Region(self.scratch.ctypes.data, PROBE_BYTES, "cpu", 0)])
        rank = self.memory.described(agent.metadata())
        own = handshake([rank], shape, worker_id="reader")
        return Own(ReaderRank(rank, shape.ranks), own, self.scratch.ctypes.data)

    def assert_holds(self, blocks: dict[int, int], torn: Container[int] = ()) -> None:
        """Assert the content of all local blocks.

        ``blocks`` maps a local block to the holder's block that it must equal. All other blocks must be zero, except
        ``torn`` ones, which may have arrived in part.
        """
        shape = self.memory.shape
        for layer, number in enumerate(self.memory.numbers):
            for local in [local for local in range(shape.blocks) if local not in torn]:
                found = self.memory.block(layer, local)
                wanted = (
                    expected(shape, number, self.memory.rank, [blocks[local]])
                    if local in blocks
                    else np.zeros_like(found)
                )
                assert np.array_equal(found, wanted), f"layer {number}, block {local}"
