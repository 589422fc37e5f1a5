"""What vLLM needs on a machine without a GPU and without its compiled parts: its CPU platform, and torch twins.

Only what is beside the experts: the layers of experts and their routers run vLLM's own code.
"""

import importlib
import importlib.util
import os
import types
from typing import Any

import torch

DEVICE = os.environ.get("EP_MOE_ENGINE_DEVICE", "cpu")  # of models
LENGTHS: list[int] = []  # of the sequences of the current forward pass
LIBRARIES: list[torch.library.Library] = []  # an operation exists as long as its library


def platform() -> str:
    """The entry point of the test-only platform plug-in."""
    return "vllm.platforms.cpu.CpuPlatform"


def attention(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """Causal attention of whole prompts that stand one behind another, with sliding windows and sinks."""
    q = query.view(-1, self.num_heads, self.head_size).transpose(0, 1)
    k = key.view(-1, self.num_kv_heads, self.head_size).transpose(0, 1)
    v = value.view(-1, self.num_kv_heads, self.head_size).transpose(0, 1)
    k, v = (tensor.repeat_interleave(self.num_heads // self.num_kv_heads, dim=0) for tensor in (k, v))
    ends = torch.tensor(LENGTHS, device=q.device).cumsum(0)
    position = torch.arange(q.shape[1], device=q.device)
    sequence = torch.bucketize(position, ends, right=True)
    distance = position[:, None] - position[None]
    seen = (sequence[:, None] == sequence[None]) & (distance >= 0)
    window = getattr(self, "sliding_window", None)
    if window is not None:
        seen &= distance < window
    scores = (q @ k.transpose(1, 2)) * self.impl_scale
    scores = scores.masked_fill(~seen, -torch.inf)
    if self.twin_sinks is not None:
        sinks = self.twin_sinks.view(-1, 1, 1).expand(-1, q.shape[1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v).transpose(0, 1).reshape(query.shape[0], -1)


def _twins() -> dict[str, tuple[str, Any]]:
    """Compiled operations by name: their schema, and a function in torch."""

    def silu_and_mul(result: torch.Tensor, x: torch.Tensor) -> None:
        gate, up = x.chunk(2, dim=-1)
        result.copy_(torch.nn.functional.silu(gate) * up)

    def topk(scores: Any, weights: torch.Tensor, ids: torch.Tensor, renormalize: bool, bias: Any) -> None:
        chosen = scores if bias is None else scores + bias
        found = chosen.topk(weights.shape[1], dim=-1).indices
        picked = scores.gather(1, found)
        weights.copy_(picked / picked.sum(-1, keepdim=True) if renormalize else picked)
        ids.copy_(found)

    def topk_softmax(weights: Any, ids: Any, rows: Any, logits: torch.Tensor, renormalize: bool, bias: Any) -> None:
        topk(logits.float().softmax(-1), weights, ids, renormalize, bias)

    return {
        "_C::silu_and_mul": ("(Tensor! result, Tensor input) -> ()", silu_and_mul),
        "_moe_C::topk_softmax": (
            "(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, "
            "bool renormalize, Tensor? bias) -> ()",
            topk_softmax,
        ),
    }


def packed_modules() -> list[Any]:
    """The modules of compressed-tensors' packed integers that select kernels, which differ between versions."""
    folder = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
    names = [f"{folder}.compressed_tensors_moe_wna16{end}" for end in ("", "_marlin")]
    found = [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]
    return [module for module in found if hasattr(module, "select_wna16_moe_backend")]


def install() -> None:
    """Replace compiled operations and attention; call it before a model is made."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, modelopt, moe_wna16, mxfp4
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4,
        compressed_tensors_moe_w8a8_int8,
        compressed_tensors_moe_w8a8_mxfp8,
    )
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.models import registry
    from vllm.v1.worker.workspace import init_workspace_manager

    CustomOp.dispatch_forward = lambda self, *_, **__: self.forward_native
    made = Attention.__init__

    def init(self: Any, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any) -> None:
        made(self, num_heads, head_size, scale, *args, **kwargs)
        self.impl_scale, self.twin_sinks = scale, kwargs.get("sinks")

    def inspect_model_cls(self: Any) -> Any:
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect_model_cls  # vLLM starts a process, which imports again
    mxfp4.select_mxfp4_moe_backend = lambda *_: (None, None)  # it finds no kernel of its own on a CPU and raises
    for module in packed_modules():
        marlin = module.WNA16MoEBackend.MARLIN
        module.select_wna16_moe_backend = lambda *_, marlin=marlin, **__: (marlin, None)  # the same
        module.check_moe_marlin_supports_config = lambda *_, **__: True
    for module in (auto_awq, auto_gptq, moe_wna16):
        module.check_moe_marlin_supports_layer = lambda *_, **__: True
        module.select_wna16_moe_backend = lambda *_, **__: (None, None)
    auto_awq.AutoAWQConfig.get_min_capability = classmethod(lambda cls: -1)  # that of a CPU for moe_wna16
    modelopt.select_fp8_moe_backend = modelopt.select_nvfp4_moe_backend = lambda *_, **__: (None, None)
    compressed_tensors_moe_w4a4_nvfp4.select_nvfp4_moe_backend = lambda *_, **__: (None, None)
    for module in (modelopt, compressed_tensors_moe_w8a8_mxfp8):
        module.select_mxfp8_moe_backend = lambda *_, **__: (None, None)
    compressed_tensors_moe_w8a8_int8.select_int8_moe_backend = lambda *_, **__: (None, None)
    for config in (
        Fp8Config,
        CompressedTensorsConfig,
        mxfp4.Mxfp4Config,
        auto_awq.AutoAWQConfig,
        auto_gptq.AutoGPTQConfig,
        modelopt.ModelOptFp8Config,
        modelopt.ModelOptMxFp8Config,
        modelopt.ModelOptNvFp4Config,
        moe_wna16.MoeWNA16Config,
    ):
        config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])
    Attention.__init__ = init
    Attention.forward = attention
    torch.accelerator.empty_cache = lambda: None
    init_workspace_manager(torch.device(DEVICE))  # as vLLM's workers do
    if DEVICE == "cpu":
        torch.accelerator.current_stream = lambda *_: types.SimpleNamespace(is_capturing=lambda: False)
        torch.cuda.is_current_stream_capturing = lambda: False
    for name, (schema, function) in _twins().items():
        library, operation = name.split("::")
        if not hasattr(getattr(torch.ops, library), operation):
            fragment = torch.library.Library(library, "FRAGMENT")
            fragment.define(operation + schema)
            fragment.impl(operation, function, "CPU" if DEVICE == "cpu" else "CUDA")
            LIBRARIES.append(fragment)
