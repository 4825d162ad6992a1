"""A vLLM engine in this process: its OpenAI server, its events, its load, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from connector.layout.engine_layout import UnsupportedEngine, window_price
from connector.vllm_version import check_version
from services.worker.engines.port import (
    AsgiApp,
    Engine,
    EngineDead,
    EngineFacts,
    EngineLoad,
    EngineRefused,
    EngineTokens,
    Identity,
    TokenizerFiles,
)
from services.worker.engines.vllm import environment
from services.worker.engines.vllm.arguments import OWN_CONNECTOR, arguments, configure_connector, refuse_unsupported
from services.worker.engines.vllm.daemon_thread import in_daemon_thread
from services.worker.settings import TINY_MODEL, Settings
from services.worker.tiny_model.tiny_model import ensure_tiny_model
from shared.contracts.kv_events import KvEvent
from shared.contracts.workers import Fingerprint, HashScheme
from shared.runtime.settings import CommonSettings

if TYPE_CHECKING:
    from services.worker.engines.vllm.client import LegEngine
    from services.worker.engines.vllm.kv_events import KvEventSource
    from services.worker.engines.vllm.kv_exchange import VllmExchange
    from services.worker.engines.vllm.stats import EngineMeter

log = logging.getLogger("baton.worker")

DEATH_CHECK_S = 0.25
"""Between two checks whether the engine still lives."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Which engine to start, and for which worker."""

    settings: Settings
    identity: Identity
    model: str
    run_dir: Path
    otlp_endpoint: str
    media_hosts: frozenset[str]

    @property
    def refusal_file(self) -> Path:
        """Written by the connector, in EngineCore's process."""
        return self.run_dir / "refused"


async def start_engine(
    settings: Settings, common: CommonSettings, report: Callable[[str], None], *, identity: Identity
) -> Engine:
    """Start vLLM; half a minute on a CPU. ``report`` gets its progress. Raises EngineRefused, or what vLLM raises."""
    report("preparing the model")
    is_tiny = settings.model == TINY_MODEL
    model = str(await asyncio.to_thread(ensure_tiny_model, Path(common.cache_dir))) if is_tiny else settings.model
    environment.prepare_import(kv_host=settings.kv_host, model_is_local=model.startswith(("/", "./", "../")))
    run_dir = Path(tempfile.mkdtemp(prefix="baton-engine-"))
    launch = Launch(
        settings=settings,
        identity=identity,
        model=model,
        run_dir=run_dir,
        otlp_endpoint=common.otlp_endpoint,
        media_hosts=common.media_hosts,
    )
    try:
        report("importing vLLM")
        await in_daemon_thread(_import_vllm)
        return await _start(launch, report)
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise


def _kill_children() -> None:
    """An engine that was still starting has processes that no object refers to."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _import_vllm() -> None:
    """Takes ten seconds, so it runs off the event loop."""
    import vllm

    check_version(vllm.__version__)
    import vllm.entrypoints.launchers.api_server.app_state
    import vllm.entrypoints.launchers.app
    import vllm.v1.engine.async_llm

    import services.worker.engines.vllm.client  # noqa: F401


async def _start(launch: Launch, report: Callable[[str], None]) -> VllmEngine:
    from vllm.platforms import current_platform
    from vllm.renderers.chat_utils import load_chat_template

    from services.worker.engines.vllm.kv_events import KvEventSource
    from services.worker.engines.vllm.kv_exchange import VllmExchange
    from services.worker.engines.vllm.stats import EngineMeter

    source, meter = KvEventSource(launch.run_dir), EngineMeter()
    exchange = VllmExchange(launch.run_dir) if launch.settings.connector == "baton" else None
    typed = arguments(
        launch.settings,
        launch.model,
        on_cpu=current_platform.is_cpu(),
        events=(source.endpoint, source.replay_endpoint),
        otlp_endpoint=launch.otlp_endpoint,
        media_hosts=launch.media_hosts,
    )
    try:
        report("loading the model")
        args, llm, fingerprinted = await in_daemon_thread(
            lambda: _construct(launch, typed, meter, notifications=exchange.endpoint if exchange else "")
        )
        try:
            report("starting the OpenAI server")
            app = await _openai_app(llm, args, meter)
            if exchange is not None:
                exchange.attach(llm.engine_core, llm.note_death)
        except BaseException:
            llm.shutdown()
            raise
    except BaseException:
        source.close()
        if exchange is not None:
            exchange.close()
        _kill_children()
        raise
    facts = _facts(llm.vllm_config, args.served_model_name, fingerprinted, launch.settings.legs_max)
    if facts.note:
        log.warning("%s", facts.note)
    return VllmEngine(
        llm,
        app,
        source,
        exchange,
        run_dir=launch.run_dir,
        chat_template=load_chat_template(args.chat_template) or "",
        facts=facts,
    )


def _construct(
    launch: Launch, typed: list[str], meter: EngineMeter, *, notifications: str
) -> tuple[Any, LegEngine, Fingerprint]:
    """Blocks until the engine is ready. Raises EngineRefused."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from services.worker.engines.vllm.client import LegEngine
    from services.worker.engines.vllm.fingerprint import fingerprint

    try:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(typed)
    except SystemExit:
        raise ValueError(f"vLLM refuses its arguments (see above; WORKER_ENGINE_ARGS?): {shlex.join(typed)}") from None
    validate_parsed_serve_args(args)
    logging.disable(logging.NOTSET)  # vLLM disables all loggers while it makes its parser, and may not enable them.
    engine_args = AsyncEngineArgs.from_cli_args(args)
    cores = environment.parse_cores(launch.settings.cpu_cores)
    threads = environment.engine_threads(cores) if current_platform.is_cpu() else contextlib.nullcontext()
    with threads:
        config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        try:
            refuse_unsupported(config)
        except UnsupportedEngine as unsupported:
            raise EngineRefused(str(unsupported)) from None
        fingerprinted = fingerprint(config, args.lora_modules or ())
        configure_connector(
            config,
            launch.settings,
            launch.identity,
            notifications=notifications,
            fingerprint=fingerprinted,
            refusal_file=launch.refusal_file,
        )
        try:
            llm = LegEngine.from_vllm_config(
                config, usage_context=UsageContext.OPENAI_API_SERVER, stat_loggers=[lambda *_args, **_options: meter]
            )
        except Exception:
            if launch.refusal_file.exists():  # vLLM's own exception only says that EngineCore did not start.
                raise EngineRefused(launch.refusal_file.read_text(encoding="utf-8")) from None
            raise
    # vLLM has chosen the block size while the engine started, unless it was given.
    return args, llm, msgspec.structs.replace(fingerprinted, block_size=llm.vllm_config.cache_config.block_size)


async def _openai_app(llm: LegEngine, args: Any, meter: EngineMeter) -> AsgiApp:
    """VLLM's own server around ``LegEngine``, set up in vLLM's own order."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.gc_utils import freeze_gc_heap

    from services.worker.engines.vllm.fingerprint import block_bytes
    from services.worker.engines.vllm.media import only_vllm_reads_media, separate_tenants
    from services.worker.engines.vllm.rendering import bound_rendering

    bound_rendering(llm.model_config.max_model_len)
    only_vllm_reads_media()
    separate_tenants(llm.renderer)
    llm.attach(meter, block_bytes(llm.vllm_config))
    cache = llm.vllm_config.cache_config
    meter.kv_blocks = cache.num_gpu_blocks or 0
    meter.steps.tokens_per_use = meter.kv_blocks * cache.block_size
    await llm.reset_mm_cache()
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    app.state.server = SimpleNamespace(should_exit=False)  # vLLM sets this when the engine has died.
    freeze_gc_heap()
    served: AsgiApp = app
    return served


class VllmEngine:
    """See ``engines.port.Engine``."""

    def __init__(
        self,
        llm: LegEngine,
        app: AsgiApp,
        source: KvEventSource,
        exchange: VllmExchange | None,
        *,
        run_dir: Path,
        chat_template: str,
        facts: EngineFacts,
    ) -> None:
        self._chat_template = chat_template
        self._llm = llm
        self._app = app
        self._source = source
        self._exchange = exchange
        self._run_dir = run_dir
        self._facts = facts

    @property
    def facts(self) -> EngineFacts:
        """See the port."""
        return self._facts

    @property
    def app(self) -> AsgiApp:
        """VLLM's OpenAI server."""
        return self._app

    @property
    def exchange(self) -> VllmExchange | None:
        """None with vLLM's own connector."""
        return self._exchange

    def load(self) -> EngineLoad:
        """See the port."""
        return self._llm.meter.load()

    def on_load_changed(self, listener: Callable[[], None]) -> None:
        """After each step of the engine."""
        self._llm.meter.on_changed(listener)

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """Changes of the prefix cache, in order."""
        async for events in self._source.batches():
            yield events
        raise EngineDead("the event stream ended")

    def tokenizer_files(self) -> TokenizerFiles:
        """See the port."""
        from services.worker.engines.vllm.tokenizer import tokenizer_files

        return tokenizer_files(self._llm.get_tokenizer(), self._chat_template)

    async def tokens(self, path: str, body: bytes) -> EngineTokens:
        """From vLLM's own server and hashing."""
        from services.worker.engines.vllm.tokenizer import engine_tokens

        return await engine_tokens(self._app, self._llm.vllm_config.cache_config, path, body)

    async def dead(self) -> str:
        """Returns when EngineCore has ended or reported a fatal error."""
        while not self._llm.errored:
            await asyncio.wait([self._llm.died], timeout=DEATH_CHECK_S)
            if self._llm.died.done():
                return self._llm.died.result()
        return str(self._llm.dead_error)

    async def close(self, deadline_s: float) -> None:
        """End EngineCore and all its processes."""
        await asyncio.to_thread(self._llm.shutdown, timeout=deadline_s)
        self._source.close()
        if self._exchange is not None:
            self._exchange.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)


def hash_scheme(cache: Any) -> HashScheme:
    """How vLLM names blocks, in this environment."""
    scheme = HashScheme(block_size=cache.block_size, algorithm=cache.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    return scheme if seed is None else msgspec.structs.replace(scheme, seed=seed)


def _facts(config: Any, names: list[str], fingerprint: Fingerprint, legs_max: int) -> EngineFacts:
    return EngineFacts(
        engine="vllm",
        models=list(names),
        max_model_len=config.model_config.max_model_len,
        fingerprint=fingerprint,
        hashing=hash_scheme(config.cache_config),
        kv_blocks=config.cache_config.num_gpu_blocks or 0,
        legs_max=legs_max,
        step_tokens_max=config.scheduler_config.max_num_batched_tokens,
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        note=window_price(config.model_config) if config.kv_transfer_config.kv_connector == OWN_CONNECTOR else "",
    )
