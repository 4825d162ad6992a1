"""A vLLM engine in this process: its OpenAI server, its events, its load, its end."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from connector.layout.engine_layout import UnsupportedEngine, check_version
from connector.layout.routes import kv_sizes_of
from connector.messages import EngineCall
from connector.scheduler.grant_socket import new_socket_path
from connector.transfer.threads import in_daemon_thread
from services.worker.engines.adapters import AdapterRefused, LoadedAdapters
from services.worker.engines.backends import check_backend
from services.worker.engines.port import (
    Engine,
    EngineDead,
    EngineFacts,
    EngineLoad,
    EngineRefused,
    EngineTokens,
    Identity,
    TokenizerFiles,
)
from services.worker.engines.vllm.arguments import (
    OWN_CONNECTOR,
    arguments,
    bindings_of,
    configure_connector,
    engine_threads,
    parse_cores,
    prepare_import,
    refuse_other_connectors,
    refuse_unsupported,
    untested,
)
from services.worker.engines.vllm.cache_settings import choose_cache_options, required_dtype, typed_options
from services.worker.engines.vllm.nodes import Followers
from services.worker.engines.vllm.profiler import VllmProfiler, configure_profiler
from services.worker.kv_events import blocks_of_windows, narrow_windows
from services.worker.settings import TINY_MODEL, Settings
from services.worker.tiny_model import ensure_tiny_model
from shared.contracts.engine_paths import SERVED
from shared.contracts.kv_events import KvEvent
from shared.contracts.workers import Fingerprint, HashScheme
from shared.loopback import is_loopback
from shared.runtime.settings import CommonSettings
from shared.sockets import free_port

if TYPE_CHECKING:
    from services.worker.engines.vllm.client import LegEngine
    from services.worker.engines.vllm.kv_events import KvEventSource
    from services.worker.engines.vllm.kv_exchange import VllmExchange
    from services.worker.engines.vllm.openai_app import VllmServer
    from services.worker.engines.vllm.stats import EngineMeter

log = logging.getLogger("baton.worker")

DEATH_CHECK_S = 0.25
"""Interval at which the engine's process is looked for."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Which engine to start, and for which worker."""

    settings: Settings
    identity: Identity
    model: str
    run_dir: Path
    otlp_endpoint: str
    media_hosts: frozenset[str]
    port: int = 0
    """The ranks of several hosts meet here; 0: all are on one."""

    @property
    def refusal_file(self) -> Path:
        """Written by the connector, in EngineCore's process."""
        return self.run_dir / "refused"

    @property
    def trace_dir(self) -> Path:
        """Where the engine's profiler writes."""
        return self.run_dir / "traces"


async def start_engine(
    settings: Settings, common: CommonSettings, report: Callable[[str], None], *, identity: Identity
) -> Engine:
    """Start vLLM; half a minute on a CPU. ``report`` gets its progress. Raises EngineRefused, or what vLLM raises."""
    report("preparing the model")
    model = await model_of(settings, common)
    port = free_port(settings.meeting[0]) if settings.nodes > 1 else 0
    followers = await Followers.gather(settings, identity.epoch, port, report) if settings.nodes > 1 else None
    run_dir = Path(tempfile.mkdtemp(prefix="baton-engine-"))
    launch = Launch(
        settings=settings,
        identity=identity,
        model=model,
        run_dir=run_dir,
        otlp_endpoint=common.otlp_endpoint,
        media_hosts=common.media_hosts,
        port=port,
    )
    try:
        report("importing vLLM")
        await import_engine(launch)
        await check_backend(nixl_package_of_torch(), settings.kv_backend)
        return await _start(launch, report, followers)
    except BaseException:
        if followers is not None:
            await followers.close()
        shutil.rmtree(run_dir, ignore_errors=True)
        raise


async def model_of(settings: Settings, common: CommonSettings) -> str:
    """The model's path or name; the tiny one is made."""
    if settings.model != TINY_MODEL:
        return settings.model
    return str(await asyncio.to_thread(ensure_tiny_model, Path(common.cache_dir)))


async def import_engine(launch: Launch) -> None:
    """Import vLLM with what it must find in the environment. Raises EngineRefused."""
    settings = launch.settings
    prepare_import(
        kv_host=settings.kv_address,
        model_is_local=launch.model.startswith(("/", "./", "../")),
        rank_host=_rank_host(settings),
    )
    await in_daemon_thread("start-engine", _import_vllm)


def nixl_package_of_torch() -> str:
    """The package that ``nixl`` stands for in the engine's process."""
    import torch

    from services.worker.engines.vllm.kv_exchange import nixl_package

    return nixl_package(torch.version.cuda)


def _rank_host(settings: Settings) -> str:
    """Address of this host for the ranks of its engine or group; empty: vLLM's choice."""
    if settings.nodes > 1 or (settings.data_parallel_size > 1 and settings.head_address):
        return settings.kv_address if settings.node or settings.data_parallel_rank else settings.meeting[0]
    return "127.0.0.1" if settings.connector == "baton" or is_loopback(settings.kv_address) else ""


def kill_children() -> None:
    """An engine that was still starting has processes that no object refers to."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _import_vllm() -> None:
    """Takes ten seconds, so it runs off the event loop. Raises EngineRefused."""
    try:
        _import_what_is_used()
    except UnsupportedEngine as unsupported:
        raise EngineRefused(str(unsupported)) from None
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        raise EngineRefused(
            f"vLLM cannot be imported ({error}): torchvision was built for another torch than the one that is here. "
            "Install both from the same index, or `pip uninstall torchvision`; `make setup` does without it"
        ) from None


def _import_what_is_used() -> None:
    """Raises UnsupportedEngine."""
    import vllm

    check_version(vllm.__version__)
    import vllm.entrypoints.launchers.api_server.app_state
    import vllm.entrypoints.launchers.app
    import vllm.v1.engine.async_llm

    import services.worker.engines.vllm.client  # noqa: F401


def _inspect_models_here() -> None:
    """VLLM inspects a model's class, once on each machine, in a further process that imports vLLM again, as that may
    initialize CUDA. On a CPU it would only make the first start of a model ten seconds longer.
    """
    import vllm.model_executor.models.registry

    vllm.model_executor.models.registry._run_in_subprocess = lambda inspect: inspect()


async def _start(launch: Launch, report: Callable[[str], None], followers: Followers | None) -> VllmEngine:
    from vllm.platforms import current_platform
    from vllm.renderers.chat_utils import load_chat_template

    from services.worker.engines.vllm.kv_events import KvEventSource
    from services.worker.engines.vllm.kv_exchange import VllmExchange
    from services.worker.engines.vllm.stats import EngineMeter

    if current_platform.is_cpu():
        _inspect_models_here()
    source = KvEventSource(launch.run_dir)
    meter = EngineMeter(stages=launch.settings.pipeline_parallel_size)
    exchange = VllmExchange(launch.run_dir) if launch.settings.connector == "baton" else None
    typed = _arguments(launch, (source.endpoint, source.replay_endpoint))
    try:
        report("loading the model")
        constructing = in_daemon_thread(
            "start-engine",
            lambda: _construct(launch, typed, meter, notifications=exchange.endpoint if exchange else ""),
        )
        args, llm, fingerprinted, chosen = await (followers.unless_lost(constructing) if followers else constructing)
        try:
            if followers is not None:
                followers.on_lost(llm.note_death)
            report("starting the OpenAI server")
            modules, args.lora_modules = args.lora_modules or (), None
            app = await _openai_app(llm, args, meter)
            adapters = await _adapters(launch, llm, app, modules)
            alignment, groups, beyond, dropped = await llm.engine_core.call_utility_async("cache_groups")
            source.attach(groups)
            kv_sizes = (0, 0)
            if exchange is not None:
                exchange.attach(llm.engine_core, llm.note_death)
                described = (await exchange.call(EngineCall(describe=True))).handshake
                kv_sizes = kv_sizes_of(described) if described is not None else kv_sizes
        except BaseException:
            llm.shutdown()
            raise
    except BaseException:
        source.close()
        if exchange is not None:
            exchange.close()
        kill_children()
        raise
    facts = _facts(
        llm.vllm_config,
        args.served_model_name,
        msgspec.structs.replace(fingerprinted, block_size=llm.hash_block_size),
        hash_scheme(llm.vllm_config.cache_config, llm.hash_block_size, alignment, groups, beyond, dropped),
        launch.settings.legs_max,
        app.paths & SERVED,
        note="; ".join(chosen),
    )
    facts = replace(facts, kv_token_bytes=kv_sizes[0], kv_boundary_bytes=kv_sizes[1])
    return VllmEngine(
        llm,
        app,
        source,
        exchange,
        adapters,
        followers,
        run_dir=launch.run_dir,
        trace_dir=launch.trace_dir,
        chat_template=load_chat_template(args.chat_template) or "",
        facts=facts,
    )


def _construct(
    launch: Launch, typed: list[str], meter: EngineMeter, *, notifications: str
) -> tuple[Any, LegEngine, Fingerprint, list[str]]:
    """Blocks until the engine is ready. The texts say what was chosen for the model. Raises EngineRefused."""
    from vllm.usage.usage_lib import UsageContext

    from services.worker.engines.vllm import decode_stream, grammar_process
    from services.worker.engines.vllm.client import LegEngine
    from services.worker.engines.vllm.engine_process import end_coordinator_with_parent
    from services.worker.engines.vllm.grammar_trials import GrammarTrials, cpu_s_max
    from services.worker.engines.vllm.openai_app import without_prometheus

    decode_stream.install()
    args = _parsed(typed, launch.settings)
    with _threads(launch.settings):
        config, fingerprinted, chosen = _configuration(launch, args, notifications)
        generates = config.model_config.runner_type == "generate"
        trials = grammar_process.start(config) if generates else None
        if config.parallel_config.data_parallel_size > 1:
            end_coordinator_with_parent()
        try:
            llm = LegEngine.from_vllm_config(
                config, usage_context=UsageContext.OPENAI_API_SERVER, stat_loggers=[lambda *_args, **_options: meter]
            )
        except Exception:
            if launch.refusal_file.exists():  # vLLM's own exception only says that EngineCore did not start.
                raise EngineRefused(launch.refusal_file.read_text(encoding="utf-8")) from None
            raise
    if trials is not None:
        llm.grammars = GrammarTrials(trials, llm.note_death, cpu_s_max(len(os.sched_getaffinity(0))))
    without_prometheus(llm.logger_manager)
    return args, llm, fingerprinted, chosen


@contextlib.contextmanager
def configuration_of_ranks(launch: Launch) -> Iterator[Any]:
    """VLLM's configuration for the ranks of a further host, and its threads while they start. Raises EngineRefused."""
    args = _parsed(_arguments(launch, ("", "")), launch.settings)
    with _threads(launch.settings):
        yield _configuration(launch, args, notifications="")[0]


def _arguments(launch: Launch, events: tuple[str, str]) -> list[str]:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _inspect_models_here()
    return arguments(
        launch.settings,
        launch.model,
        on_cpu=current_platform.is_cpu(),
        events=events,
        otlp_endpoint=launch.otlp_endpoint,
        media_hosts=launch.media_hosts,
        port=launch.port,
    )


def _configuration(launch: Launch, args: Any, notifications: str) -> tuple[Any, Fingerprint, list[str]]:
    """VLLM's, with Baton's connector. The texts say what was chosen for the model. Raises EngineRefused."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from services.worker.engines.vllm.fingerprint import fingerprint

    try:
        config, chosen = _configured(AsyncEngineArgs.from_cli_args(args), launch.settings)
    except UnsupportedEngine as unsupported:
        raise EngineRefused(str(unsupported)) from None
    except (ValueError, NotImplementedError) as error:
        if has_failed_to_read(error):
            raise
        about = f"the model {launch.model} or its options, with WORKER_ENGINE_ARGS={launch.settings.engine_args!r}"
        raise EngineRefused(f"vLLM refuses {about}: {refusal_of(error)}") from error
    for text in chosen:
        log.info("for this model: %s", text)
    for text in untested(config):
        log.warning("Baton was not tested with %s", text)
    fingerprinted = fingerprint(config, launch.settings.kv_backend)
    configure_connector(
        config,
        launch.settings,
        launch.identity,
        notifications=notifications,
        grant_socket=new_socket_path(launch.run_dir),
        fingerprint=fingerprinted,
        refusal_file=launch.refusal_file,
    )
    configure_profiler(config, launch.trace_dir)
    return config, fingerprinted, chosen


def _configured(engine_args: Any, settings: Settings) -> tuple[Any, list[str]]:
    """What vLLM resolves, and what was chosen for the model. Raises UnsupportedEngine, and what vLLM raises."""
    from vllm.usage.usage_lib import UsageContext

    typed, chosen = typed_options(settings.engine_args), []
    is_headless = settings.node > 0
    config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=is_headless)
    if dtype := required_dtype(config, typed):
        engine_args.dtype = dtype
        config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=is_headless)
        chosen.append(f"--dtype {dtype}, since a CPU computes gated delta nets in no other")
    refuse_other_connectors(config.kv_transfer_config, settings)
    refuse_unsupported(config, settings)
    if config.kv_transfer_config.kv_connector == OWN_CONNECTOR:
        chosen += choose_cache_options(config, typed, settings.role)
    return config, chosen


def refusal_of(error: Exception) -> str:
    """What vLLM says; it checks most of its configuration with pydantic, which adds the values and an address."""
    if found := validations_of(error):
        return "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in found)
    return str(error)


def has_failed_to_read(error: Exception) -> bool:
    """Whether a file or the model hub could not be read, which another start may do."""
    causes: list[BaseException | None] = [error, *(one.get("ctx", {}).get("error") for one in validations_of(error))]
    while causes:
        cause = causes.pop()
        if isinstance(cause, OSError):
            return True
        if cause is not None:
            causes.append(cause.__cause__ or cause.__context__)
    return False


def validations_of(error: Exception) -> list[dict[str, Any]]:
    """The errors of pydantic's exception; none of another one."""
    errors: Callable[[], list[dict[str, Any]]] | None = getattr(error, "errors", None)
    return errors() if errors is not None else []


def _parsed(typed: list[str], settings: Settings) -> Any:
    """The arguments as vLLM's server reads them. Raises EngineRefused with what vLLM says."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from services.worker.engines.vllm.cli_args import make_arg_parser, validate_parsed_serve_args

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            args = make_arg_parser(FlexibleArgumentParser()).parse_args(typed)
    except SystemExit:
        why, given = complaint.getvalue().strip().rpartition("error: ")[2], settings.engine_args
        raise EngineRefused(f"vLLM refuses its arguments, with WORKER_ENGINE_ARGS={given!r}: {why}") from None
    validate_parsed_serve_args(args)
    logging.disable(logging.NOTSET)  # vLLM disables all loggers while it makes its parser, and may not enable them.
    return args


def _threads(settings: Settings) -> contextlib.AbstractContextManager[None]:
    """Binds a CPU engine's threads to its cores. Raises EngineRefused when there are too few."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return contextlib.nullcontext()
    try:
        bindings = bindings_of(parse_cores(settings.cpu_cores), settings.ranks_here, apart=settings.ranks > 1)
    except ValueError as error:
        raise EngineRefused(str(error)) from None
    return engine_threads(bindings)


async def _openai_app(llm: LegEngine, args: Any, meter: EngineMeter) -> VllmServer:
    """VLLM's own server around ``LegEngine``, set up in vLLM's own order."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.renderers.chat_utils import load_chat_template
    from vllm.utils.gc_utils import freeze_gc_heap

    from services.worker.engines.vllm.fingerprint import model_revision, token_bytes
    from services.worker.engines.vllm.known_texts import reuse_tokens
    from services.worker.engines.vllm.media import (
        name_by_content,
        only_vllm_reads_media,
        refuse_files,
        separate_tenants,
    )
    from services.worker.engines.vllm.openai_app import VllmServer, trim
    from services.worker.engines.vllm.resume import derive_ids
    from services.worker.engines.vllm.text_bounds import bound_texts
    from services.worker.engines.vllm.tokenizer import bound_rendering

    bound_rendering(llm.model_config.max_model_len)
    bound_texts(llm.model_config.max_model_len)
    derive_ids()
    only_vllm_reads_media()
    refuse_files()
    separate_tenants(llm.renderer)
    name_by_content(llm.renderer, model_revision(llm.model_config))
    reuse_tokens(llm.renderer, load_chat_template(args.chat_template) or "")
    hash_block_size = await llm.engine_core.call_utility_async("hash_block_size")
    llm.attach(meter, token_bytes(llm.vllm_config), hash_block_size)
    if llm.grammars is not None:
        await llm.grammars.connect()
    cache = llm.vllm_config.cache_config
    meter.kv_tokens = meter.steps.tokens_per_use = cache.kv_cache_size_tokens or 0
    await llm.reset_mm_cache()
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    trim(app)
    await init_app_state(llm, app.state, args, tasks)
    app.state.server = SimpleNamespace(should_exit=False)  # vLLM sets this when the engine has died.
    freeze_gc_heap()
    return VllmServer(app)


async def _adapters(launch: Launch, llm: LegEngine, app: VllmServer, modules: Sequence[Any]) -> LoadedAdapters | None:
    """The adapters of ``--lora-modules`` are loaded; None without ``--enable-lora``. Raises EngineRefused."""
    from vllm.lora.utils import get_adapter_absolute_path

    from services.worker.engines.vllm.adapters import VllmAdapters

    if llm.vllm_config.lora_config is None:
        return None
    backend = VllmAdapters(llm, app, hashes_content=launch.settings.connector == "baton")
    adapters = LoadedAdapters(backend, [base.name for base in app.models.base_model_paths], launch.run_dir)
    for module in modules:
        try:
            if module.is_3d_lora_weight:
                raise AdapterRefused(f"is_3d_lora_weight of {module.name} is not supported")
            folder = await asyncio.to_thread(get_adapter_absolute_path, module.path)  # It may be a name on the hub.
            await adapters.load(module.name, Path(folder))
        except AdapterRefused as refused:
            raise EngineRefused(f"--lora-modules: {refused}") from None
    return adapters


class VllmEngine(Engine):
    """VLLM in this process and EngineCore in another."""

    def __init__(  # noqa: PLR0913  # wiring
        self,
        llm: LegEngine,
        app: VllmServer,
        source: KvEventSource,
        exchange: VllmExchange | None,
        adapters: LoadedAdapters | None,
        followers: Followers | None,
        *,
        run_dir: Path,
        trace_dir: Path,
        chat_template: str,
        facts: EngineFacts,
    ) -> None:
        from services.worker.engines.vllm.tokenizer import VllmRenderer
        from services.worker.engines.vllm.weights import VllmWeights

        self._chat_template = chat_template
        self._llm = llm
        self.app: VllmServer = app
        self._source = source
        self.exchange: VllmExchange | None = exchange
        self.adapters = adapters
        self._followers = followers
        self.renderer = VllmRenderer(app, facts.hashing) if facts.renders else None
        self.profiler = VllmProfiler(llm, trace_dir)
        self._run_dir = run_dir
        self.facts = facts
        # The engines of a data parallel group would have to pause in the same step.
        is_alone = llm.vllm_config.parallel_config.data_parallel_size == 1
        can_change = exchange is not None and is_alone
        self.weights = VllmWeights(llm, facts.fingerprint, facts.hashing) if can_change else None

    def load(self) -> EngineLoad:
        return self._llm.meter.load()

    def on_load_changed(self, listener: Callable[[], None]) -> None:
        self._llm.meter.on_changed(listener)

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        async for events in self._source.batches():
            yield events
        raise EngineDead("the event stream ended")

    def tokenizer_files(self) -> TokenizerFiles:
        from services.worker.engines.vllm.tokenizer import tokenizer_files

        return tokenizer_files(self._llm.get_tokenizer(), self._chat_template)

    async def tokens(self, path: str, body: bytes) -> EngineTokens:
        """From vLLM's own server and hashing."""
        from services.worker.engines.vllm.tokenizer import engine_tokens

        return await engine_tokens(self.app, self.facts.hashing, path, body, self.app.models.lora_requests)

    async def dead(self) -> str:
        """Returns when EngineCore has ended or reported a fatal error."""
        while not self._llm.errored:
            await asyncio.wait([self._llm.died], timeout=DEATH_CHECK_S)
            if self._llm.died.done():
                return self._llm.died.result()
        return str(self._llm.dead_error)

    async def close(self, deadline_s: float) -> None:
        if self._followers is not None and self._followers.lost.done():
            kill_children()  # They wait for the ranks of a host that is gone.
        await asyncio.to_thread(self._llm.shutdown, timeout=deadline_s)
        if self._followers is not None:
            await self._followers.close()
        if self._llm.grammars is not None:
            self._llm.grammars.close()
        self._source.close()
        if self.exchange is not None:
            self.exchange.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)


def hash_scheme(
    cache: Any,
    hash_block_size: int,
    alignment: int = 0,
    groups: Sequence[tuple[int, bool, int]] = (),
    beyond: Sequence[int] = (0, 0),
    dropped: int = 0,
) -> HashScheme:
    """How vLLM names blocks, in this environment. ``groups``: of each KV cache group its block size, whether it is full
    attention, and its window in tokens (0: none). ``beyond``, ``dropped``: see ``beyond_boundaries`` and
    ``dropped_from_hits``.
    """
    groups = groups if cache.enable_prefix_caching else ()
    full = [size for size, is_full, _window in groups if is_full]
    window_block, window_blocks = blocks_of_windows(groups)
    boundaries = len(groups) > 1 or bool(groups and not full)
    scheme = HashScheme(
        block_size=hash_block_size,
        index_block=lcm(*full) if full else 0,
        boundaries=boundaries,
        alignment=alignment if boundaries else 0,
        window_block=window_block,
        window_blocks=max(window_blocks.values(), default=1),
        narrow=bool(narrow_windows(groups)),
        full_beyond=beyond[0] if boundaries else 0,
        window_beyond=window_block if beyond[1] else 0,
        dropped=dropped if cache.enable_prefix_caching else 0,
        algorithm=cache.prefix_caching_hash_algo,
    )
    seed = os.environ.get("PYTHONHASHSEED")
    return scheme if seed is None else msgspec.structs.replace(scheme, seed=seed)


def _facts(
    config: Any,
    names: list[str],
    fingerprint: Fingerprint,
    hashing: HashScheme,
    legs_max: int,
    paths: frozenset[str],
    note: str,
) -> EngineFacts:
    return EngineFacts(
        engine="vllm",
        models=list(names),
        max_model_len=config.model_config.max_model_len,
        fingerprint=fingerprint,
        hashing=hashing,
        kv_tokens=config.cache_config.kv_cache_size_tokens or 0,
        legs_max=legs_max,
        step_tokens_max=config.scheduler_config.max_num_batched_tokens,
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        renders=config.model_config.runner_type == "generate",
        # With a drafter vLLM gives none, and its server fails.
        scores_tokens=config.speculative_config is None,
        adapters_at_once_max=config.lora_config.max_loras if config.lora_config is not None else 0,
        paths=paths,
        note=note,
    )
