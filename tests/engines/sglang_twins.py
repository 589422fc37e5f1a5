"""What SGLang needs on a machine without a GPU and without its compiled parts: empty modules, and torch twins.

Only what is beside the experts: the MoE blocks, their routers and the layers of experts run SGLang's own code.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

# packages that SGLang imports and that nothing here calls: compiled kernels, media, grammars, notebooks
UNUSED = "IPython av cuda decord flash_attn gguf llguidance numba_cuda outlines pynvml quack sgl_kernel soundfile soxr"
UNUSED += " tilelang timm torch_memory_saver torchao torchvision vllm"
EMPTY = tuple(UNUSED.split())
MODELS = ("deepseek_v2", "gpt_oss", "qwen3_moe")  # modules of those that are tested


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes packages whose every attribute is a mock."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in EMPTY:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__name__, module.__spec__ = [], spec.name, spec
        module.__file__, module.__version__ = None, "0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Make the packages; call it before SGLang is imported. torch and Triton look for some of them: they come first."""
    import torch
    import triton  # noqa: F401
    import tvm_ffi  # noqa: F401

    if not torch.cuda.is_available():  # it would call the NCCL that a CUDA build of torch brings
        os.environ["SGLANG_NCCL_SO_PATH"] = "none"
    sys.meta_path.append(_Empty())
    found = importlib.util.find_spec("sglang.srt.models")
    assert found is not None
    models = pkgutil.iter_modules(found.submodule_search_locations)
    unused = [model.name for model in models if model.name not in MODELS]
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(unused)  # importing them takes 8 seconds


def install_twins() -> None:
    """Replace what has no CPU code; call it before a model is made."""
    import torch
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS, modelopt_quant
    from sglang.srt.layers.quantization.awq import awq
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4_moe
    from sglang.srt.layers.quantization.gptq import gptq
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.layers.rotary_embedding import factory

    QUANTIZATION_METHODS["mxfp4"] = Mxfp4Config  # listed on GPUs alone
    names = "fp8 compressed-tensors mxfp4 w8a8_int8 w8a8_fp8 blockwise_int8 gptq_marlin awq_marlin"
    for name in (*names.split(), "modelopt_fp8", "modelopt_fp4", "moe_wna16"):
        QUANTIZATION_METHODS[name].get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])
    # what asks for a GPU: these formats have kernels of SGLang's there, which no case here calls
    awq._is_cuda = True
    awq.check_marlin_supported = gptq.check_marlin_supported = lambda *_, **__: True
    awq.verify_marlin_supported = lambda *_, **__: None
    platform = types.SimpleNamespace(is_blackwell=True)
    for module in (modelopt_quant, compressed_tensors_w4a4_nvfp4_moe):
        if hasattr(module, "is_blackwell_supported"):  # in 0.5.17
            module.is_blackwell_supported = lambda: True
        else:
            module.get_platform = lambda: platform
    modelopt_quant.swizzle_blockscale = torch.clone  # of scales for SGLang's own kernels
    compressed_tensors.CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True
    factory.get_rope_cpu = lambda *_, **__: torch.nn.Identity()  # of DeepSeek's attention, which is not called
