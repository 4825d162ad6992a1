"""Every interface of vLLM and NIXL that Baton touches beyond their documented API, read from sources.

``vllm_interfaces_RELEASE.txt`` has those of each supported release. ``python -m tests.unit.connector.vllm_interfaces``
prints what differs in the installed one, with ``--releases`` also in the others, whose source distributions it fetches,
and with ``--write`` records all of them. docs/vllm.md says when to do that. Nothing of vLLM is imported.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from connector.layout.engine_layout import series_of
from tests.support.vllm_releases import RELEASES, fetch_sources

KV = "vllm/distributed/kv_transfer"

INTERFACES = {
    "vllm/exceptions.py": "VLLMValidationError VLLMValidationError.__init__ QueueOverflowError QueueOverflowError.__init__",
    f"{KV}/kv_connector/v1/base.py": (
        "KVConnectorBase_V1 KVConnectorHandshakeMetadata KVConnectorMetadata KVConnectorRole KVConnectorTransferResults "
        "KVConnectorWorkerMetadata KVConnectorBase_V1.bind_kv_cache_manager SupportsHMA"
    ),
    f"{KV}/kv_transfer_state.py": "get_kv_transfer_group has_kv_transfer_group",
    f"{KV}/kv_connector/v1/nixl/connector.py": "NixlPullConnector.__init__",
    f"{KV}/kv_connector/v1/nixl/metadata.py": "NIXL_CONNECTOR_VERSION",
    "vllm/distributed/kv_events.py": (
        "BlockStored BlockRemoved AllBlocksCleared EventBatch KVEventBatch MEDIUM_CPU MEDIUM_GPU MEDIUM_STORAGE "
        "EventPublisherFactory EventPublisherFactory.register_publisher EventPublisherFactory.create ZmqEventPublisher "
        "ZmqEventPublisher.__init__ ZmqEventPublisher.publish ZmqEventPublisher._publisher_thread "
        "ZmqEventPublisher._service_replay ZmqEventPublisher.shutdown"
    ),
    "vllm/config/vllm.py": "VllmConfig",
    "vllm/config/profiler.py": "ProfilerConfig",
    "vllm/profiler/wrapper.py": "TorchProfilerWrapper.__init__ TorchProfilerWrapper._stop",
    "vllm/config/model.py": "ModelConfig",
    "vllm/config/cache.py": "CacheConfig",
    "vllm/config/scheduler.py": "SchedulerConfig.get_scheduler_cls",
    "vllm/model_executor/models/registry.py": "_run_in_subprocess",
    "vllm/v1/core/block_pool.py": (
        "BlockPool.__init__ BlockPool.get_cached_block BlockPool.touch BlockPool.free_blocks BlockPool.get_new_blocks "
        "BlockPool.get_num_free_blocks BlockPool._insert_block_hash BlockPool.cache_full_blocks "
        "BlockPool.cache_partial_block BlockPool.move_block_hashes BlockPool._emit_block_removed_events "
        "BlockPool.reset_prefix_cache BlockHashToBlockMap.contain"
    ),
    "vllm/v1/core/kv_cache_manager.py": (
        "KVCacheBlocks KVCacheManager KVCacheManager.__init__ KVCacheManager.cache_blocks "
        "KVCacheManager.get_computed_blocks KVCacheManager.allocate_slots "
        "KVCacheManager.truncate_computed_blocks KVCacheManager.prefix_cache_lookup_enabled"
    ),
    "vllm/v1/core/kv_cache_coordinator.py": (
        "KVCacheCoordinator KVCacheCoordinator.cache_blocks "
        "KVCacheCoordinatorNoPrefixCache.find_longest_cache_hit "
        "UnitaryKVCacheCoordinator.find_longest_cache_hit HybridKVCacheCoordinator.find_longest_cache_hit "
        "HybridKVCacheCoordinator.verify_and_split_kv_cache_groups "
        "HybridKVCacheCoordinator.get_num_cacheable_tokens KVCacheCoordinator.get_num_cacheable_tokens "
        "KVCacheCoordinator.allocate_new_computed_blocks "
        "HybridKVCacheCoordinator.find_longest_cache_hit_per_group"
    ),
    "vllm/v1/core/single_type_kv_cache_manager.py": (
        "SingleTypeKVCacheManager.cache_blocks FullAttentionManager.find_longest_cache_hit "
        "FullAttentionManager._cache_partial_tail_block SlidingWindowManager.find_longest_cache_hit "
        "SlidingWindowManager.reachable_block_mask MambaManager.find_longest_cache_hit "
        "MambaManager.cache_blocks MambaManager.allocate_new_blocks MambaManager._cache_partial_tail_block "
        "SingleTypeKVCacheManager.add_local_computed_blocks "
        "SingleTypeKVCacheManager.allocate_external_computed_blocks FullAttentionManager.cache_blocks "
        "SlidingWindowManager.get_num_skipped_tokens MambaManager.get_num_skipped_tokens"
    ),
    "vllm/v1/core/kv_cache_utils.py": (
        "BlockHash KVCacheBlock FreeKVCacheBlockQueue get_block_hash make_block_hash_with_group_id maybe_convert_block_hash get_request_block_hasher init_none_hash "
        "resolve_kv_cache_block_sizes hash_block_tokens generate_block_hash_extra_keys _gen_lora_extra_hash_keys _gen_mm_extra_hash_keys"
    ),
    "vllm/v1/core/sched/scheduler.py": (
        "Scheduler.__init__ Scheduler.schedule Scheduler.update_from_output Scheduler.add_request "
        "Scheduler.finish_requests Scheduler.reset_prefix_cache Scheduler.has_requests Scheduler.has_finished_requests Scheduler._free_request "
        "Scheduler._connector_finished Scheduler._update_waiting_for_remote_kv "
        "Scheduler._update_from_kv_xfer_finished Scheduler._handle_invalid_blocks Scheduler._handle_failed_recving "
        "Scheduler._get_local_prefix_cache_hit Scheduler._mamba_block_aligned_split "
        "Scheduler._try_schedule_encoder_inputs Scheduler._inflight_prefill_reserved_blocks "
        "Scheduler._reserve_prefill_lookahead Scheduler._update_request_with_output"
    ),
    "vllm/v1/core/sched/async_scheduler.py": (
        "AsyncScheduler AsyncScheduler._update_after_schedule AsyncScheduler._update_request_with_output"
    ),
    "vllm/v1/core/sched/output.py": "SchedulerOutput NewRequestData GrammarOutput",
    "vllm/distributed/weight_transfer/base.py": "WeightTransferInitRequest WeightTransferUpdateRequest",
    "vllm/v1/engine/__init__.py": "EngineCoreEventType EngineCoreOutput EngineCoreOutputs EngineCoreRequest EngineCoreRequestType FinishReason",
    "vllm/v1/engine/async_llm.py": (
        "AsyncLLM.generate AsyncLLM.encode AsyncLLM._add_request AsyncLLM.from_vllm_config "
        "AsyncLLM._run_output_handler AsyncLLM.add_lora AsyncLLM.remove_lora AsyncLLM.start_profile AsyncLLM.stop_profile"
    ),
    "vllm/v1/engine/core.py": (
        "EngineCore.step EngineCore.step_with_batch_queue EngineCoreProc.run_busy_loop "
        "EngineCoreProc._process_engine_step EngineCoreProc._process_input_queue EngineCoreProc._invoke_utility_method "
        "EngineCoreProc._handle_client_request EngineCoreProc.process_input_sockets EngineCoreProc.process_output_sockets EngineCore._process_aborts_queue "
        "EngineCore.preprocess_add_request EngineCoreProc.pause_scheduler EngineCore.execute_dummy_batch "
        "DPEngineCoreProc.run_busy_loop"
    ),
    "vllm/v1/engine/coordinator.py": "DPCoordinator.__init__ DPCoordinatorProc.run_coordinator",
    "vllm/distributed/device_communicators/cpu_communicator.py": "CpuCommunicator",
    "vllm/distributed/device_communicators/base_device_communicator.py": (
        "DeviceCommunicatorBase.all_gatherv DeviceCommunicatorBase.reduce_scatterv"
    ),
    "vllm/v1/engine/core_client.py": "DPAsyncMPClient.add_request_async AsyncMPClient.call_utility_async AsyncMPClient.pause_scheduler_async",
    "vllm/v1/engine/detokenizer.py": "FastIncrementalDetokenizer.__init__ FastIncrementalDetokenizer._protected_step",
    "vllm/v1/engine/exceptions.py": "EngineDeadError",
    "vllm/v1/engine/input_processor.py": "InputProcessor.process_inputs",
    "vllm/v1/engine/output_processor.py": (
        "OutputProcessor.add_request OutputProcessor.process_outputs OutputProcessor.abort_requests "
        "RequestOutputCollector.put RequestOutputCollector.get_nowait RequestState"
    ),
    "vllm/v1/executor/multiproc_executor.py": "MultiprocExecutor.__init__ MultiprocExecutor.start_worker_monitor",
    "vllm/v1/executor/uniproc_executor.py": "UniProcExecutor UniProcExecutor._init_executor",
    "vllm/v1/executor/abstract.py": "Executor.profile",
    "vllm/v1/kv_cache_interface.py": (
        "KVCacheConfig KVCacheGroupSpec AttentionSpec FullAttentionSpec MLAAttentionSpec SlidingWindowSpec "
        "SlidingWindowMLASpec MambaSpec is_full_attention_spec is_quantized_kv_cache get_kv_cache_spec_sliding_window"
    ),
    "vllm/model_executor/layers/mamba/mamba_utils.py": "is_conv_state_dim_first MambaStateShapeCalculator",
    "vllm/distributed/kv_transfer/kv_connector/v1/ssm_conv_transfer_utils.py": "derive_mamba_conv_split",
    "vllm/v1/kv_cache_layout.py": "KVCacheLayout",
    "vllm/v1/metrics/cache_hit_source.py": "CacheHitSource",
    "vllm/v1/metrics/loggers.py": "StatLoggerBase PrometheusStatLogger StatLoggerManager.record",
    "vllm/inputs/engine.py": "TokensInput EncoderDecoderInput",
    "vllm/v1/metrics/stats.py": "SchedulerStats IterationStats PromptTokenStats PrefillStats",
    "vllm/v1/outputs.py": "KVConnectorOutput ModelRunnerOutput AsyncModelRunnerOutput LogprobsLists",
    "vllm/v1/request.py": "Request Request.__init__ Request.from_engine_core_request Request.update_block_hashes RequestStatus",
    "vllm/v1/sample/thinking_budget_state.py": (
        "ThinkingBudgetStateHolder._init_state_entry ThinkingBudgetStateHolder._update_think_state"
    ),
    "vllm/v1/worker/gpu/sample/thinking_budget.py": "_thinking_budget_kernel",
    "vllm/v1/utils.py": "IterationDetails",
    "vllm/v1/worker/cpu_worker.py": "CPUWorker",
    "vllm/v1/worker/gpu_worker.py": "Worker.sample_tokens Worker.load_model",
    "vllm/distributed/parallel_state.py": "get_pp_group",
    "vllm/distributed/device_communicators/shm_broadcast.py": (
        "SpinCondition SpinCondition.__init__ SpinCondition.wait MessageQueue.acquire_read"
    ),
    "vllm/v1/worker/gpu_model_runner.py": (
        "GPUModelRunner.sample_tokens GPUModelRunner._bookkeeping_sync GPUModelRunner.sync_and_gather_intermediate_tensors"
    ),
    "vllm/v1/worker/gpu/kv_connector.py": (
        "ActiveKVConnector.pre_forward ActiveKVConnector.post_forward ActiveKVConnector.no_forward"
    ),
    "vllm/v1/worker/kv_connector_model_runner_mixin.py": "KVConnectorModelRunnerMixin._get_kv_connector_output",
    "vllm/v1/worker/utils.py": "allocate_kv_cache AttentionGroup.map_kv_cache_to_kernel_blocks",
    "vllm/v1/attention/backends/cpu_attn.py": (
        "_get_attn_isa CPUAttentionBackend.supported_kv_cache_layouts CPUAttentionBackend.supported_kv_cache_dtypes"
    ),
    "vllm/v1/attention/backends/mla/cpu_mla.py": "CPUMLABackend.supported_kv_cache_dtypes",
    "vllm/v1/attention/backends/utils.py": "resolve_kv_cache_layout get_supported_kv_cache_layouts",
    "vllm/outputs.py": "RequestOutput PoolingRequestOutput",
    "vllm/pooling_params.py": "PoolingParams",
    "vllm/sampling_params.py": (
        "SamplingParams SamplingType RequestOutputKind StructuredOutputsParams SamplingParams._validate_structured_outputs"
    ),
    "vllm/v1/structured_output/__init__.py": (
        "StructuredOutputManager StructuredOutputManager.__init__ StructuredOutputManager.grammar_init "
        "StructuredOutputManager._create_grammar"
    ),
    "vllm/v1/structured_output/request.py": "StructuredOutputRequest StructuredOutputRequest.grammar",
    "vllm/v1/structured_output/backend_types.py": "StructuredOutputBackend StructuredOutputGrammar",
    "vllm/engine/arg_utils.py": "AsyncEngineArgs EngineArgs.create_engine_config",
    "vllm/entrypoints/launchers/app.py": "build_app",
    "vllm/entrypoints/launchers/api_server/app_state.py": "init_app_state",
    "vllm/entrypoints/launchers/cli_args.py vllm/entrypoints/common/cli_args.py": "make_arg_parser validate_parsed_serve_args",
    "vllm/entrypoints/anthropic/serving.py": "AnthropicServingMessages.message_stream_converter",
    "vllm/entrypoints/openai/responses/serving.py": (
        "OpenAIServingResponses.responses_stream_generator OpenAIServingResponses._process_simple_streaming_events"
    ),
    "vllm/entrypoints/openai/models/serving.py": "OpenAIServingModels OpenAIServingModels.init_static_loras",
    "vllm/lora/request.py": "LoRARequest",
    "vllm/lora/utils.py": "get_adapter_absolute_path",
    "vllm/lora/worker_manager.py": "LRUCacheWorkerLoRAManager.add_adapter WorkerLoRAManager._load_adapter",
    "vllm/config/lora.py": "LoRAConfig",
    "vllm/multimodal/media/connector.py": "MediaConnector._load_file_url",
    "vllm/multimodal/processing/context.py": "BaseProcessingInfo.model_id",
    "vllm/multimodal/processing/inputs.py": "ProcessorInputs.get_mm_hashes",
    "vllm/renderers/base.py": (
        "BaseRenderer._process_multimodal BaseRenderer._tokenize_prompt BaseRenderer._build_tokens_prompt "
        "BaseRenderer._wants_offsets BaseRenderer._tokenize_singleton_prompt_async"
    ),
    "vllm/renderers/params.py": "TokenizeParams.get_encode_kwargs",
    "vllm/renderers/chat_utils.py vllm/renderers/chat_utils/chat_template.py": "load_chat_template",
    "vllm/usage/usage_lib.py": "UsageContext",
    "vllm/utils/__init__.py": "random_uuid",
    "vllm/utils/async_utils.py": "make_async",
    "vllm/utils/argparse_utils.py": "FlexibleArgumentParser",
    "vllm/utils/gc_utils.py": "freeze_gc_heap",
    "vllm/utils/hashing.py": "get_hash_fn_by_name sha256_cbor",
    "nixl_cu12/_api.py": "nixl_agent.__init__ nixl_agent_config",
}
"""By file, or by the files of which each release has one: functions and methods count with their code, classes with their
fields and the signatures of their methods.
"""


def installed() -> dict[str, str]:
    """``file::name`` of each interface of the installed release, and its digest and signature; ``missing`` for one that
    does not exist.
    """
    return interfaces_of(None)


def interfaces_of(sources: Path | None) -> dict[str, str]:
    """The same of vLLM in a folder; None: the installed one. Other packages are the installed ones."""
    return {
        f"{file}::{name}": _described(sources, file, name)
        for files, names in INTERFACES.items()
        for file in [next((one for one in files.split() if _source(sources, one)), files)]
        for name in names.split()
    }


def installed_release() -> str:
    """Of the vLLM that would be imported."""
    assigned = [one for one in _source(None, "vllm/_version.py").body if isinstance(one, ast.Assign)]
    (version,) = (ast.literal_eval(one.value) for one in assigned if ast.unparse(one.targets[0]) == "__version__")
    return series_of(version)


def recorded_in(release: str) -> Path:
    return Path(__file__).with_name(f"vllm_interfaces_{release}.txt")


def recorded(release: str) -> dict[str, str]:
    """The interfaces of a release as Baton was written for them."""
    return dict(line.split(" ", 1) for line in recorded_in(release).read_text().splitlines())


def differences(now: dict[str, str], before: dict[str, str]) -> list[str]:
    """One text for each interface that differs."""
    return [
        f"{name}\n  recorded: {before.get(name, 'not recorded')}\n  found:    {now.get(name, 'not listed')}"
        for name in sorted({*now, *before})
        if now.get(name) != before.get(name)
    ]


def _described(sources: Path | None, file: str, name: str) -> str:
    source = _source(sources, file)
    node = _find(source, name) if source is not None else None
    if node is None:
        return "missing"
    if isinstance(node, ast.ClassDef):
        text = "\n".join(_shape(node))
        about = f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        about = f"def {node.name}({ast.unparse(node.args)})"
        text = about + ast.unparse(_without_docstring(node))
    else:
        about = text = ast.unparse(node)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:12]} {' '.join(about.split())}"


def _shape(node: ast.ClassDef) -> Iterator[str]:
    yield from map(ast.unparse, [*node.bases, *node.decorator_list])
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{[ast.unparse(each) for each in one.decorator_list]} {one.name}({ast.unparse(one.args)})"
        elif isinstance(one, ast.AnnAssign | ast.Assign):
            yield ast.unparse(one)


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.Module:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return ast.Module(body=[*body], type_ignores=[])


@cache
def _source(sources: Path | None, file: str) -> ast.Module | None:
    package, _, path = file.partition("/")
    if sources is not None and (sources / package).is_dir():
        folders = [sources / package]
    else:
        spec = find_spec(package)
        folders = [Path(one) for one in (spec.submodule_search_locations or ())] if spec is not None else []
    found = [folder / path for folder in folders]
    return ast.parse(found[0].read_text()) if found and found[0].exists() else None


def _find(source: ast.AST, name: str) -> ast.stmt | None:
    first, _, rest = name.partition(".")
    for node in ast.walk(source):
        is_named = getattr(node, "name", "") == first
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            is_named = any(isinstance(target, ast.Name) and target.id == first for target in targets)
        if is_named and isinstance(node, ast.stmt):
            return _find(node, rest) if rest else node
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--releases", action="store_true", help="all supported releases, not only the installed one")
    parser.add_argument("--write", action="store_true", help="record all supported releases")
    options = parser.parse_args()
    here = installed_release()
    found = {here: installed()}
    if options.releases or options.write:
        with tempfile.TemporaryDirectory() as folder:
            for release in RELEASES.keys() - found.keys():
                found[release] = interfaces_of(fetch_sources(RELEASES[release], Path(folder)))
    for release, now in sorted(found.items()):
        before = recorded(release if recorded_in(release).exists() else here)
        print(f"vLLM {release}:", "\n".join(differences(now, before)) or "nothing has changed")
        if options.write:
            recorded_in(release).write_text("".join(f"{name} {about}\n" for name, about in now.items()))


if __name__ == "__main__":
    main()
