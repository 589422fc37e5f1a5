"""The installed DeepEP: which one it is, what it offers, and what it lacks for a mode.

Interfaces as of DeepEP 1.2.1 (V1) and 2.1 (V2): github.com/deepseek-ai/DeepEP, `deep_ep/buffers/{legacy,elastic}.py`.
The packages `deep_ep` and `deep-ep` on PyPI are uploads of a third party that cannot be built.
"""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

MODULE = "deep_ep"
SOURCES = "build it from github.com/deepseek-ai/DeepEP (the package deep_ep on PyPI is not DeepSeek's)"

# for each mode the class, and for each of its methods the arguments that the adapter passes
NEEDED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "low_latency": (
        "Buffer",
        {
            "__init__": "group num_rdma_bytes low_latency_mode num_qps_per_rank explicitly_destroy",
            "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
            "low_latency_dispatch": (
                "x topk_idx num_max_dispatch_tokens_per_rank num_experts use_fp8 return_recv_hook"
            ),
            "low_latency_combine": "x topk_idx topk_weights handle return_recv_hook",
            "destroy": "",
        },
    ),
    "normal": (
        "Buffer",
        {
            "__init__": "group num_nvl_bytes num_rdma_bytes explicitly_destroy",
            "get_dispatch_config": "num_ranks",
            "get_combine_config": "num_ranks",
            "set_num_sms": "new_num_sms",
            "get_dispatch_layout": "topk_idx num_experts",
            "dispatch": (
                "x num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert topk_idx "
                "topk_weights"
            ),
            "combine": "x handle async_finish",
            "destroy": "",
        },
    ),
    "v2": (
        "ElasticBuffer",
        {
            "__init__": (
                "group num_max_tokens_per_rank hidden num_topk deterministic num_cpu_timeout_secs "
                "num_gpu_timeout_secs explicitly_destroy"
            ),
            "dispatch": "x topk_idx topk_weights num_experts num_max_tokens_per_rank num_sms do_cpu_sync",
            "combine": "x handle async_with_compute_stream",
            "destroy": "",
        },
    ),
}
MODES = tuple(NEEDED)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """An imported DeepEP that has what `mode` needs."""

    module: Any
    mode: str
    topk_idx_dtype: torch.dtype  # of ids, a choice of its build

    @property
    def buffer_class(self) -> Any:
        """`Buffer` or `ElasticBuffer`."""
        return getattr(self.module, NEEDED[self.mode][0])

    @property
    def has_v2(self) -> bool:
        """Whether it is a version that has `ElasticBuffer`, in whatever mode."""
        return hasattr(self.module, NEEDED["v2"][0])


def find_library(mode: str, max_tokens_per_rank: int) -> Library:
    """Import DeepEP and choose the mode.

    Args:
        mode: one of MODES, or "auto": "v2" if the library has it, else "low_latency" for M up to 256, else "normal".
    Errors: ValueError for another mode. RuntimeError says what is found (file, version, classes) and what it lacks.
    Local.
    """
    if mode not in (*MODES, "auto"):
        raise ValueError(f"mode ({mode!r}) is not one of auto, {', '.join(MODES)}")
    module = _import()
    if mode == "auto":
        small = "low_latency" if max_tokens_per_rank <= 256 else "normal"
        mode = small if missing_parts(module, "v2") else "v2"
    missing = missing_parts(module, mode)
    if missing:
        raise RuntimeError(f"transport 'deepep' ({mode}): {describe(module)} lacks {', '.join(missing)}; {SOURCES}")
    dtype = getattr(module, "topk_idx_t", torch.int64)
    return Library(module=module, mode=mode, topk_idx_dtype=dtype)


def describe(module: ModuleType) -> str:
    """The module's file, version, distribution and classes, for messages. Local."""
    names = sorted(set(importlib.metadata.packages_distributions().get(MODULE, ())))
    installed = [f"{name} {importlib.metadata.version(name)}" for name in names]
    classes = [name for name in ("Buffer", "ElasticBuffer", "HybridEPBuffer") if hasattr(module, name)]
    return (
        f"the {MODULE} at {getattr(module, '__file__', None)} (version {getattr(module, '__version__', 'unknown')}"
        f"{', of ' + ', '.join(installed) if installed else ''}; classes: {', '.join(classes) or 'none'})"
    )


def missing_parts(module: ModuleType, mode: str) -> list[str]:
    """The classes, methods and arguments that `mode` needs and the module has not. Local."""
    class_name, methods = NEEDED[mode]
    if not hasattr(module, class_name):
        return [f"class {class_name}"]
    found, missing = getattr(module, class_name), []
    for method, arguments in methods.items():
        if not hasattr(found, method):
            missing.append(f"{class_name}.{method}")
            continue
        try:
            known = inspect.signature(getattr(found, method)).parameters
        except (TypeError, ValueError):  # compiled code may not tell its arguments
            continue
        missing += [f"{class_name}.{method}({name}=)" for name in arguments.split() if name not in known]
    return missing


def _import() -> ModuleType:
    """The module. Its import checks CUDA and NCCL, and may fail in ways of its own."""
    try:
        spec = importlib.util.find_spec(MODULE)
    except ValueError:  # a module of that name that nothing has imported
        spec = None
    if spec is None:
        raise RuntimeError(f"transport 'deepep' needs DeepEP, and there is no module {MODULE}; {SOURCES}")
    try:
        return importlib.import_module(MODULE)
    except Exception as error:  # noqa: BLE001 - sent to the other ranks, which wait for what this one has found
        where = spec.origin or ", ".join(spec.submodule_search_locations or ())
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise RuntimeError(f"transport 'deepep': the {MODULE} at {where} cannot be imported: {what}") from error
