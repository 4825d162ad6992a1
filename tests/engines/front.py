"""vLLM's server, parsers and front end without its engine: a test says which tokens the engine makes, and how many of
them the server hears of at once.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer

from services.worker.engines.port import CURRENT_LEG, AsgiApp, Leg, LegInput, LegResult
from services.worker.legs.asgi_call import AsgiCall
from services.worker.settings import Settings
from services.worker.tiny_model import _config, ensure_tiny_tokenizer
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import LegOrder
from shared.contracts.workers import HashScheme
from tests.support.builders import start_leg

MODEL = "m"
BLOCK = 32
"""Tokens of a block on CPUs."""
CHAT = "/v1/chat/completions"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>")
"""Words of one token in the vocabularies of models that think and call tools."""


def model_with_marks(folder: Path) -> Path:
    """A model's directory without weights: baton-tiny's tokenizer and the marks."""
    made = folder / "model"
    made.mkdir()
    plain = ensure_tiny_tokenizer(folder)
    shutil.copy(plain / "tokenizer_config.json", made)
    tokenizer = Tokenizer.from_file(str(plain / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "config.json").write_text(json.dumps(_config(tokenizer.get_vocab_size())))
    return made


def model_with_images(folder: Path) -> Path:
    """The directory of a tiny BLIP-2 without weights, which takes one image."""
    made = model_with_marks(folder)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<image>", normalized=False, special=True)])
    tokenizer.save(str(made / "tokenizer.json"))
    text = {**_config(tokenizer.get_vocab_size()), "model_type": "opt", "ffn_dim": 64, "hidden_size": 64}
    text.update(architectures=["OPTForCausalLM"], max_position_embeddings=4096, word_embed_proj_dim=64)
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    qformer = {**vision, "encoder_hidden_size": 32, "vocab_size": 8}
    config = {
        "architectures": ["Blip2ForConditionalGeneration"],
        "model_type": "blip-2",
        "image_token_index": tokenizer.token_to_id("<image>"),
        "num_query_tokens": 8,
        "text_config": text,
        "vision_config": {**vision, "image_size": 32, "patch_size": 16},
        "qformer_config": qformer,
        "torch_dtype": "float32",
    }
    (made / "config.json").write_text(json.dumps(config))
    images = {
        "image_processor_type": "BlipImageProcessor",
        "processor_class": "Blip2Processor",
        "size": {"height": 32, "width": 32},
    }
    (made / "preprocessor_config.json").write_text(json.dumps(images))
    (made / "processor_config.json").write_text(
        json.dumps({"processor_class": "Blip2Processor", "num_query_tokens": 8})
    )
    return made


class Core:
    """In the place of the engine: says ``answer``, whatever was asked."""

    def __init__(
        self, engine: Any, answer: list[int], tasks: tuple[str, ...] = ("generate",), hash_block_size: int = BLOCK
    ) -> None:
        self.tasks = tasks
        self.hash_block_size = hash_block_size
        self.resources = SimpleNamespace(engine_dead=False)
        self.answer = answer
        self.asked: list[Any] = []
        """The engine's requests."""
        self.joined: Collection[int] = ()
        """Which tokens the server hears of together with the one before."""
        self.first: dict[str, Any] = {}
        """What comes with the first token."""
        self.prompt_tokens = 0
        """Of the first request; what others have beyond them has been said before."""
        self._engine = engine
        self._talks: set[asyncio.Task[None]] = set()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return self.tasks

    async def call_utility_async(self, method: str) -> int:
        assert method == "hash_block_size"
        return self.hash_block_size

    async def reset_mm_cache_async(self) -> None:
        return

    async def abort_requests_async(self, _names: list[str]) -> None:
        return

    def shutdown(self, timeout: float | None = None) -> None:
        return

    async def add_request_async(self, request: Any) -> None:
        self.asked.append(request)
        self.prompt_tokens = self.prompt_tokens or len(request.prompt_token_ids)
        talk = asyncio.create_task(self._talk(request), name="talk")
        self._talks.add(talk)
        talk.add_done_callback(self._talked)

    def _talked(self, talk: asyncio.Task[None]) -> None:
        """The server would wait for ever for a talk that failed: it is told that its engine is dead."""
        self._talks.discard(talk)
        if not talk.cancelled() and (error := talk.exception()) is not None:
            self._engine.output_processor.propagate_error(error)

    async def _talk(self, request: Any) -> None:
        from services.worker.engines.vllm.resume import _output

        relayed = request.prompt_token_ids[self.prompt_tokens :]
        assert relayed == self.answer[: len(relayed)]
        processor, name = self._engine.output_processor, request.request_id
        queue = processor.request_states[name].queue
        for index in range(len(relayed), len(self.answer)):
            output = _output(name, self.answer[index], 0, request.sampling_params)
            for field, value in self.first.items() if index == 0 else ():
                setattr(output, field, value)
            processor.process_outputs([output])
            while index + 1 not in self.joined and queue.output is not None:
                await asyncio.sleep(0)


class Pieces:
    """What a router would get: pieces of the answer, each with its tokens."""

    def __init__(self) -> None:
        self.data_of: list[bytes] = []
        self.tokens_of: list[list[int]] = []
        self.joined_of: list[list[int]] = []

    def head(self, status: int, _content_type: str) -> None:
        assert status == 200

    def data(self, data: bytes, token_ids: Any = (), joined: list[int] | None = None, _cached: Any = None) -> None:
        self.data_of.append(data)
        self.tokens_of.append(list(token_ids))
        self.joined_of.append(joined or [])

    async def drain(self) -> None:
        return

    def relayed(self, cut: int) -> tuple[list[int], frozenset[int]]:
        """The tokens of the first ``cut`` pieces, and which of them were heard of together with the one before."""
        tokens: list[int] = []
        joined: list[int] = []
        for said, together in zip(self.tokens_of[:cut], self.joined_of[:cut], strict=True):
            joined += [len(tokens) + index for index in together]
            tokens += said
        return tokens, frozenset(joined)


class Front:
    """A worker's front end and shell, with ``core`` behind them."""

    def __init__(self, app: AsgiApp, core: Core, scheme: HashScheme) -> None:
        self.app = app
        self.core = core
        self.scheme = scheme

    async def serve(
        self,
        body: dict[str, Any],
        resume: tuple[list[int], frozenset[int]] | None = None,
        created: int = 0,
        *,
        path: str = CHAT,
        answer_id: str = "",
        order: LegOrder | None = None,
    ) -> tuple[Pieces, LegResult]:
        """One leg; a decode leg if it has an order."""
        usage = {"stream_options": {"include_usage": True}} if path == CHAT else {}
        raw = json.dumps({"model": MODEL, "stream": True, **usage, **body}).encode()
        start = start_leg(
            request_id="q",
            kind=LegKind.AGGREGATED if order is None else LegKind.DECODE,
            path=path,
            body=raw,
            resume=b"" if resume is not None else None,
            created=created,
        )
        tokens, joined = resume or (None, frozenset())
        given = LegInput(
            kind=start.kind,
            request_id="q",
            path=path,
            resume=tokens,
            resume_joined=joined,
            answer_id=answer_id,
            order=order,
        )
        pieces = Pieces()
        call = AsgiCall(start, raw, pieces, _no_server_error)
        await asyncio.create_task(self._call(call, given))
        return pieces, call.result

    async def _call(self, call: AsgiCall, given: LegInput) -> None:
        CURRENT_LEG.set(Leg(given, call.result))
        await call.run(self.app)
        call.finish()


async def _no_server_error() -> None:
    return


@asynccontextmanager
async def front(
    model: Path,
    engine_args: str,
    answer: list[int],
    *,
    media_hosts: frozenset[str] = frozenset(),
    max_model_len: int = 4096,
    tasks: tuple[str, ...] = ("generate",),
    hash_block_size: int = BLOCK,
) -> AsyncIterator[Front]:
    """vLLM's own server with these arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from services.worker.engines.vllm.arguments import arguments
    from services.worker.engines.vllm.cli_args import make_arg_parser
    from services.worker.engines.vllm.engine import _openai_app, hash_scheme
    from services.worker.engines.vllm.stats import EngineMeter

    settings = Settings(model=str(model), served_model_name=MODEL, max_model_len=max_model_len, engine_args=engine_args)
    line = arguments(settings, settings.model, on_cpu=True, events=("", ""), otlp_endpoint="", media_hosts=media_hosts)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    engine = _bare_engine(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    engine.engine_core = core = Core(engine, answer, tasks, hash_block_size)
    try:
        app = await _openai_app(engine, args, EngineMeter())
        yield Front(app, core, hash_scheme(engine.vllm_config.cache_config, engine.hash_block_size))
    finally:
        engine.output_handler = None
        engine.shutdown()


def _bare_engine(config: Any) -> Any:
    """All of our engine client but the engine's process, which vLLM starts when it makes one."""
    from vllm.renderers import renderer_from_config
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    from services.worker.engines.vllm.client import LegEngine

    engine = LegEngine.__new__(LegEngine)
    engine.vllm_config = config
    engine.model_config = config.model_config
    engine.scheduler_config = config.scheduler_config
    engine.observability_config = config.observability_config
    engine.log_requests = False
    engine.renderer = renderer_from_config(config)
    engine.input_processor = InputProcessor(config, engine.renderer)
    engine.output_processor = OutputProcessor(engine.renderer.tokenizer, log_stats=False)
    engine.admission_stats = None
    engine.output_handler = SimpleNamespace(done=lambda: False)
    return engine
