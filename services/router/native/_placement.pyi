from services.router.placement.cost import Cost, DecodeEstimate, PrefillEstimate
from services.router.state.block_table import Depths
from services.router.state.fleet_table import Bools, Floats, Ints
from services.router.state.worker_view import WorkerView

NUMBERS: str
FLAGS: str
CANDIDATE_BYTES: int

def unpack(
    packed: bytes, number: int, prefill: type[PrefillEstimate], decode: type[DecodeEstimate], cost: type[Cost], /
) -> tuple[int, int, tuple[float, float, float], PrefillEstimate, DecodeEstimate, Cost]: ...

class Columns:
    def __init__(self, numbers: Floats, /) -> None: ...
    def read(self, row: int, /) -> list[float]: ...
    def write(self, row: int, first: int, /, *values: float) -> None: ...

class NativePlacement:
    def __init__(self, numbers: Floats, flags: Bools, groups: Ints, free: Bools, /) -> None: ...
    def fit(self, count: int, mask: Bools, excluded: tuple[int, ...], heard_min: float, /) -> int: ...
    def choose(
        self,
        tokens: int,
        tokens_out: int,
        fetch_tokens_min: int,
        now: float,
        ttft_target_s: float,
        itl_target_s: float,
        tie_s: float,
        mode: int,
        options: int,
        groups: Ints | None,
        depths: Depths | None,
        slots: Ints | None,
        shortlisted: bool,
        views: list[WorkerView | None],
        /,
    ) -> tuple[int, int, int, bool, tuple[tuple[int, int], ...], bytes, tuple[WorkerView, ...]] | None: ...
    def is_full(self) -> bool: ...
