"""Finds what a DeepSpeed engine holds or does that zckpt cannot save and restore completely. The texts use DeepSpeed's
own names for it."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters.deepspeed.classes import is_a
from zckpt.adapters.deepspeed.group import process_group, process_group_of_owners
from zckpt.adapters.deepspeed.wrapper import kind_of
from zckpt.adapters.scheduler import unsupported_scheduler
from zckpt.engines.group import ranks_of
from zckpt.engines.tensors import persistent_buffers, unsaveable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zckpt.adapters.deepspeed.adapter import DeepSpeedAdapter
    from zckpt.adapters.kind import Kind

SUPPORTED = (
    "supported: ZeRO stages 0, 1, 2 and 3 (zero_optimization.stage) in bf16, fp16 or fp32, with any offload device; "
    "without an optimizer, stages 0 and 3"
)


def unsupported(engine: Any, adapter: DeepSpeedAdapter) -> list[str]:
    """Returns all reasons why the engine is not supported, the most important ones first. The list is empty for an
    engine that zckpt can save and restore. ``adapter``: its adapter. Changes nothing."""
    reasons = [*_kind(engine), *_precision(engine), *_offload(engine), *_parallelism(engine), *_features(engine)]
    kind = kind_of(engine)
    if reasons or kind is None:  # It is not known where another kind of wrapper keeps its parameters.
        return reasons
    return [*_parameters(engine, adapter, kind), *unsupported_scheduler(engine.lr_scheduler)]


def _kind(engine: Any) -> Iterator[str]:
    if getattr(engine, "_inference_containers", None):  # Their weights are those of the model, or LoRA is fused in.
        yield "hybrid_engine with inference containers"
    optimizer, inner = engine.optimizer, getattr(engine.optimizer, "optimizer", None)
    if kind_of(engine) is None:
        yield f"zero_optimization.stage = {int(engine.zero_optimization_stage())} with {type(optimizer).__name__}"
    for name in ("OnebitAdam", "OnebitLamb", "ZeroOneAdam"):
        if is_a(inner, name) or is_a(optimizer, name):
            yield f"optimizer.type = {name}"


def _precision(engine: Any) -> Iterator[str]:
    if getattr(engine.optimizer, "dtype", torch.float32) not in (torch.bfloat16, torch.float16, torch.float32):
        yield f"parameters in {engine.optimizer.dtype}"
    if _setting(engine, "amp_enabled"):
        yield "amp (NVIDIA Apex)"
    if _setting(engine, "torch_autocast_enabled") and engine.torch_autocast_dtype() == torch.float16:
        yield "torch_autocast.dtype = float16"
    for setting in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if _setting(engine, setting):
            yield f"zero_optimization.{setting}"
    if _setting(engine, "zeropp_loco_param"):
        yield "zero_optimization.zeropp_loco_param"


def _offload(engine: Any) -> Iterator[str]:
    for setting in ("offload_optimizer", "offload_param"):
        offload = _setting(engine, f"zero_{setting}")
        if getattr(offload, "ratio", 1.0) < 1.0 and offload.device == "nvme":
            yield f"zero_optimization.{setting}.ratio = {offload.ratio} with device = nvme"
        if getattr(offload, "super_offload", False):
            yield f"zero_optimization.{setting}.super_offload"
    if _setting(engine, "zenflow_config") is not None:
        yield "zero_optimization.zenflow"


def _parallelism(engine: Any) -> Iterator[str]:
    zero = engine._config.zero_config
    if getattr(zero, "mics_shard_size", -1) > 0:
        yield f"zero_optimization.mics_shard_size = {zero.mics_shard_size}"
    owners = process_group_of_owners(engine)
    if engine.mp_world_size > 1 and owners is not None and process_group(engine) is not None:
        yield (
            f"tensor or pipeline parallelism over {engine.mp_world_size} ranks in an engine that has only some ranks "
            "of the job"
        )
    for method in ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"):
        stages = getattr(engine.mpu, method, lambda: 1)()
        if stages > 1 and not is_a(engine, "PipelineEngine"):
            yield f"pipeline parallelism (mpu, {stages} stages)"
    sequence = getattr(engine, "seq_parallel_group", None)
    if sequence is not None and not {*ranks_of(sequence)} <= {*ranks_of(process_group(engine))}:
        yield (
            f"sequence parallelism over ranks {list(ranks_of(sequence))} by a device mesh below stage 3, where "
            "DeepSpeed lets the weights of these ranks drift apart"
        )


def _features(engine: Any) -> Iterator[str]:
    if getattr(engine, "progressive_layer_drop", None) is not None:
        yield "progressive_layer_drop"
    if getattr(engine, "quantizer", None) is not None:
        yield "quantize_training (MoQ)"
    for name, method in getattr(engine._config, "compression_config", {}).items():
        if method.get("shared_parameters", {}).get("enabled"):
            yield f"compression_training.{name}"
    if getattr(getattr(engine._config, "compile_config", None), "deepcompile", False):
        yield "compile.deepcompile"
    if _setting(engine, "random_ltd_enabled"):
        yield "data_efficiency.data_routing.random_ltd"
    for module in engine.module.modules():
        if is_a(module, "LoRAOptimizedLinear") or is_a(module, "QuantizedLinear"):
            yield f"deepspeed.linear ({type(module).__name__})"
            break


def _parameters(engine: Any, adapter: DeepSpeedAdapter, kind: type[Kind]) -> Iterator[str]:
    # Whatever would divide a tensor of another class into the shares of the ranks might call code of that class.
    tensors = chain(engine.module.named_parameters(), persistent_buffers(engine.module)[0].items())
    reasons = [*unsaveable(tensors)]
    if reasons:
        yield from reasons
        return
    try:
        local_tensors = adapter.local_tensors
    except ValueError as error:
        yield str(error)
        return
    yield from kind.unsupported(engine.optimizer, adapter.parameters[0], local_tensors)
    for name in filter(adapter.experts.has, adapter.extra.tensors if adapter.experts.divided else ()):
        yield f"{name}, which an expert adds to its state_dict: other ranks have the same name for other experts"
        return


def pending_gradients(engine: Any) -> Iterator[str]:
    """Yields a phrase if the engine holds gradients that wait for an optimizer step. A checkpoint cannot hold them. For
    an engine whose kind is not supported, only DeepSpeed's own count of micro steps is used."""
    kind = kind_of(engine)
    pending = kind is not None and kind.has_gradients(engine.optimizer)
    steps, accumulation = engine.micro_steps, engine.gradient_accumulation_steps()
    # If the caller sets the gradient accumulation boundary, micro_steps does not tell how many gradients are waiting.
    counted = engine._is_gradient_accumulation_boundary is None and _setting(engine, "managed_gradient_accumulation", 1)
    if pending or (counted and steps % accumulation):
        counts = f"micro_steps = {steps}, gradient_accumulation_steps = {accumulation}"
        yield f"gradients that no optimizer step has used yet ({counts})"


def _setting(engine: Any, method: str, default: Any = None) -> Any:
    # Some versions of DeepSpeed do not have all of these settings.
    return getattr(engine, method)() if hasattr(type(engine), method) else default
