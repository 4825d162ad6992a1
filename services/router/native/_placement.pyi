from services.router.placement.specification import Asked, Choice
from services.router.state.block_table import Depths
from services.router.state.fleet_table import Bools, Floats, Ints
from services.router.state.worker_view import WorkerView

NUMBERS: str
FLAGS: str
CANDIDATE_BYTES: int

class Columns:
    def __init__(self, numbers: Floats, /) -> None: ...
    def read(self, row: int, /) -> list[float]: ...
    def write(self, row: int, first: int, /, *values: float) -> None: ...

class NativePlacement:
    def __init__(self, numbers: Floats, flags: Bools, sources: Bools, /) -> None: ...
    def fit(
        self,
        count: int,
        offering: Bools,
        allowed: Bools | None,
        may_prefill: Bools | None,
        may_answer: Bools | None,
        heard_min: float,
        /,
    ) -> int: ...
    def choose(
        self,
        asked: Asked,
        groups: Ints,
        depths: Depths | None,
        slots: Ints | None,
        in_use: Depths | None,
        views: list[WorkerView | None],
        /,
    ) -> Choice | bool | None: ...
