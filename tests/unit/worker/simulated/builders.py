"""Small simulated engines, and virtual time to run them in."""

from services.worker.engines.simulated.core.batch import NO_ORDER, RequestParams
from services.worker.engines.simulated.core.engine_core import EngineCore, ModelTokens
from services.worker.engines.simulated.core.settings import SimulationSettings, tokens_max
from shared.contracts.kv_exchange import KvOffer, KvSource, LegOrder
from tests.unit.worker.simulated.fleet import Fleet, Member

VOCABULARY = 1000
MODEL = ModelTokens(size=VOCABULARY, sayable=list(range(10, VOCABULARY)), eos=1)
BLOCK = 4
INSTANT = {
    "prefill_tokens_per_s": 0.0,
    "prefill_base_s": 0.0,
    "decode_base_s": 0.0,
    "decode_per_sequence_s": 0.0,
    "transfer_bytes_per_s": 0.0,
    "transfer_base_s": 0.0,
}


def settings(**changes) -> SimulationSettings:
    values = {"block_size": BLOCK, "kv_blocks": 64, "max_num_batched_tokens": 32, "max_num_seqs": 4, **changes}
    longest = tokens_max(values.get("groups", "full"), values["kv_blocks"], values["block_size"])
    values.setdefault("max_model_len", longest)
    return SimulationSettings(**values)


def engine(**changes) -> EngineCore:
    return EngineCore(settings(**changes), MODEL)


def params(max_tokens=6, *, order=NO_ORDER, **values) -> RequestParams:
    return RequestParams(max_tokens=max_tokens, order=order, **{"ignore_eos": True, **values})


OFFER = params(1, order=LegOrder(offer=True))
"""Of a prefill leg."""


def take(offer: KvOffer | None, max_tokens=6) -> RequestParams:
    """Of the decode leg after it."""
    return params(max_tokens, order=LegOrder(take=offer))


def fetch(*members: Member, max_tokens=6, follow=False, leg_id="", **order) -> RequestParams:
    """Of a leg whose prompt these are believed to hold, or to be about to compute (as ``leg_id``)."""
    sources = [
        KvSource(worker_id=member.key[0], epoch=member.key[1], follow=follow, leg_id=leg_id) for member in members
    ]
    return params(max_tokens, order=LegOrder(sources=sources, **order))


def fleet(*names, carry=None, **changes) -> Fleet:
    """Engines that are alike, connected."""
    made = Fleet(MODEL, **({} if carry is None else {"carry": carry}))
    for name in names:
        made.add(settings(worker_id=name, epoch=1, **changes))
    return made


def prefill(made: Fleet, member: Member, tokens) -> KvOffer | None:
    """What a prefill leg offers."""
    return made.answer(member, tokens, OFFER).stats.transfer_report.offer


def finish_all(core: EngineCore, *, now=0.0, check=lambda _core: None, steps_max=10_000) -> float:
    """Run until nothing is left to do; returns the virtual time."""
    core.advance(now)
    for _ in range(steps_max):
        check(core)
        wakes_at = core.wakes_at()
        if wakes_at is None:
            assert not list(core.batch.unfinished())
            return now
        now = max(now, wakes_at)
        core.advance(now)
    raise AssertionError("the engine never finishes")


def answer(core: EngineCore, prompt, asked: RequestParams | None = None, *, now=0.0):
    """The finished sequence of one prompt, alone."""
    sequence = core.add(None, list(prompt), asked or params(), now)
    finish_all(core, now=now)
    return sequence


def completion(sequence):
    return sequence.tokens[sequence.prompt_tokens :]


def prompt(length, seed=0):
    return [(seed * 131 + index * 17 + index * index) % VOCABULARY for index in range(length)]
