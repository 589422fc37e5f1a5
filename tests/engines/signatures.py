"""The calls of `ep_moe.functional` beside the releases that docs/functional.md names, whose sources are only parsed.

    python tests/engines/signatures.py [RELEASES]

Names, order and defaults of parameters and fields, methods, and members of enumerations are compared. A difference that
`EXPLAINED` does not explain is a failure, and so is an explanation of none. Every parameter and field of ours is read,
or in `IGNORED`. `test_engines.py` calls this program; RELEASES is the folder in which it has unpacked them.
"""

import ast
import dataclasses
import enum
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from releases import ROOT, cache_folder, unpacked

from ep_moe import functional
from ep_moe.config import RoutingMethod
from ep_moe.functional import flashinfer, sglang, vllm

OURS: dict[str, ModuleType] = {"FlashInfer": flashinfer, "SGLang": sglang, "vLLM": vllm}
RUNNER, MOE = "sglang/srt/layers/moe/moe_runner/", "vllm/model_executor/layers/fused_moe/"
SOURCES: dict[str, dict[str, str]] = {  # files of a release, and which of our names are theirs
    "FlashInfer 0.7.4": {
        "flashinfer/fused_moe/core.py": "trtllm_fp4_block_scale_moe",
        "flashinfer/fused_moe/cute_dsl/b12x_moe.py": "b12x_fused_moe",
        "flashinfer/tllm_enums.py": "ActivationType RoutingMethodType",
    },
    "SGLang 0.5.23": {
        "sglang/kernels/ops/moe/fused_moe_triton_kernels.py": "invoke_fused_moe_kernel moe_sum_reduce_triton",
        "sglang/srt/configs/shared_experts.py": "SharedExpertsConfig",
        "sglang/srt/layers/moe/fused_moe_triton/layer.py": "FusedMoE",
        "sglang/srt/layers/moe/fused_moe_triton/triton_kernels_moe.py": "quantize triton_kernel_fused_experts"
        " triton_kernel_fused_experts_with_bias triton_kernel_moe_forward triton_kernel_moe_with_bias_forward",
        "sglang/srt/layers/moe/topk.py": "BypassedTopKOutput StandardTopKOutput TopKConfig TritonKernelTopKOutput",
        f"{RUNNER}base.py": "MoeRunnerConfig",
        f"{RUNNER}triton_utils/__init__.py": "get_config override_config",
        f"{RUNNER}triton_utils/fused_moe.py": "fused_experts fused_experts_impl fused_moe inplace_fused_experts"
        " moe_sum_reduce_torch_compile outplace_fused_experts swiglu_gpt_oss_sigmoid_alpha"
        " swiglu_no_interleaved_with_alpha_and_limit",
        f"{RUNNER}triton_utils/fused_moe_triton_config.py": "get_config_dtype_str get_config_file_name"
        " get_default_config get_moe_configs try_get_optimal_moe_config",
        f"{RUNNER}triton_utils/moe_align_block_size.py": "moe_align_block_size",
    },
    "vLLM 0.9.2": {
        f"{MOE}config.py": "FusedMoEQuantConfig",
        f"{MOE}fused_batched_moe.py": "BatchedPrepareAndFinalize BatchedTritonExperts NaiveBatchedExperts"
        " batched_moe_kernel_quantize_input invoke_moe_batched_triton_kernel",
        f"{MOE}modular_kernel.py": "FusedMoEActivationFormat",
    },
    "vLLM 0.33.0": {
        f"{MOE}activation.py": "MoEActivation",
        f"{MOE}experts/fused_batched_moe.py": "batched_moe_kernel_quantize_input invoke_moe_batched_triton_kernel",
        f"{MOE}modular_kernel.py": "FusedMoEActivationFormat",
    },
}
WHEELS = {"FlashInfer": "flashinfer_python", "SGLang": "sglang", "vLLM": "vllm"}
Parameters = dict[str, tuple[str, str]]  # by name: "positional", "named" or "rest", and the default
REQUIRED = "required"
ALONE = "is ours alone"
EXPLAINED: tuple[tuple[str, str, str], ...] = (  # calls, differences, why they are right
    ("unshuffle_rows unshuffle_weight untile_scales", ALONE, "they undo what FlashInfer's users do to weights"),
    ("trtllm_fp4_block_scale_moe", "activation_type is 3, not ActivationType.Swiglu.value", "the same number"),
    ("trtllm_fp4_block_scale_moe", "nvfp4_4over6 is None, not _UNSET", "which reads an environment variable"),
    ("MoeParallel routing_from_topk", ALONE, "in place of SGLang's global state and of triton_kernels' routing"),
    ("InFlexData PrecisionConfig RaggedTensorMetadata", ALONE, "classes of triton_kernels, which SGLang passes on"),
    ("FlashInferFP4MoE FlashInferFusedMoE get_fused_moe_impl_class", ALONE, "of SGLang's older releases"),
    ("inplace_fused_experts_fake outplace_fused_experts_fake", ALONE, "of SGLang's older releases"),
    ("FusedMoE", "adds parallel", "in place of SGLang's global state"),
    (
        "FusedMoE.bind_full_expert_weights FusedMoE.clear_overlap_args FusedMoE.forward_deferred_finalize"
        " FusedMoE.forward_impl FusedMoE.materialize_gguf_weights FusedMoE.named_per_expert_tensors"
        " FusedMoE.num_global_routed_experts FusedMoE.replace_expert_tensor FusedMoE.run_moe_core"
        " FusedMoE.set_overlap_args FusedMoE.use_padded_loading",
        "is not here",
        "steps of SGLang's engine between its own objects",
    ),
    (
        "BypassedTopKOutput.format BypassedTopKOutput.to_standard StandardTopKOutput.format"
        " TritonKernelTopKOutput.format",
        "is not here",
        "for SGLang's choice among its backends",
    ),
    (
        "MoeRunnerConfig.moe_ep_rank MoeRunnerConfig.moe_ep_size MoeRunnerConfig.moe_tp_rank"
        " MoeRunnerConfig.moe_tp_size TopKConfig.correction_bias_for_dtype TopKConfig.num_shared_topk_slots",
        "is not here",
        "made of SGLang's global state, or of other fields",
    ),
)
REFUSED = {  # members of enumerations; the others are computed
    "ActivationType": "ClampedRelu2 Gelu InvalidType PowLU Relu Silu SwigluBias",
    "MoEActivation": "RELU2 SITU SWIGLUOAI_UNINTERLEAVE",
    "RoutingMethodType": "Unspecified",
}
METHODS = [f"{method.value} {method.name.replace('_', '').lower()}" for method in RoutingMethod]
IGNORED: tuple[tuple[str, str], ...] = (  # parameters and fields that nothing reads, and why
    ("plan_cache.thread", "of a cache's key"),
    (
        "B12xCall.w1_weight_sf B12xCall.w2_weight_sf Fp4Call.gemm1_weights_scale Fp4Call.gemm2_weights_scale"
        " GivenWeight.static_name GemmCall.B_zp FusedMoE.__init__.gemm1_beta FusedMoE.__init__.routed_scaling_factor"
        " FusedMoE.__init__.no_combine FusedMoE.__init__.inplace FusedMoE.__init__.routing_method_type",
        "read by place, or by a name",
    ),
    (
        "Fp4Call.enable_pdl Fp4Call.tune_max_num_tokens Fp4Call.workspace_buffer get_default_config.is_marlin",
        "which kernels of theirs compute, and where these store",
    ),
    ("ExpertsCall.filter_expert", "ids of no expert always add nothing"),
    (
        "FusedMoE.__init__.enable_qwen35_fp8_deferred_finalize FusedMoE.__init__.uses_expert_location"
        " SharedExpertsConfig.fusion_disabled",
        "how SGLang's engine calls its layer",
    ),
    (
        "MoeRunnerConfig.layer MoeRunnerConfig.params_dtype MoeRunnerConfig.runner_backend"
        " MoeRunnerConfig.silu_mul_keep_fp32 MoeRunnerConfig.use_tp_all_gather_activation TopKConfig.output_format"
        " TopKConfig.runner_backend TopKConfig.torch_native TopKConfig.fused_gate_packed_ids"
        " TopKConfig.allow_routed_experts_capture",
        "which backend of SGLang's computes, and how precisely; it is float32 between the GEMMs here",
    ),
    (
        "TopKConfig.fused_shared_experts_scaling_factor TopKConfig.sqrtsoftplus_log1p",
        "of fused shared experts and of a scoring_func, which are refused",
    ),
    (
        "RaggedTensorMetadata.block_offs_data RaggedTensorMetadata.block_schedule_data RaggedTensorMetadata.slice_offs"
        " TritonKernelTopKOutput.a_ragged_metadata",
        "sums of the rows of experts, which are read; outputs are read by place",
    ),
    ("FusedMoEQuantConfig.per_out_ch_quant", "of another part of vLLM's kernel, or known from the tensors"),
    (
        "_BatchedExperts.workspace_shapes.M _BatchedExperts.workspace_shapes.aq _BatchedExperts.workspace_shapes.topk"
        " _BatchedExperts.workspace_shapes.global_num_experts",
        "the shapes depend on the most rows alone",
    ),
)


def of_function(node: ast.FunctionDef) -> Parameters:
    """The parameters of a function of a release, without self and cls."""
    given = node.args
    positional = [argument.arg for argument in given.posonlyargs + given.args]
    defaults = [REQUIRED] * (len(positional) - len(given.defaults)) + [ast.unparse(value) for value in given.defaults]
    found: Parameters = {name: ("positional", value) for name, value in zip(positional, defaults, strict=True)}
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found[argument.arg] = "named", REQUIRED if value is None else ast.unparse(value)
    found |= {rest.arg: ("rest", REQUIRED) for rest in (given.vararg, given.kwarg) if rest is not None}
    return {name: value for name, value in found.items() if name not in ("self", "cls")}


def of_class(node: ast.ClassDef) -> Iterator[tuple[str, Parameters]]:
    """The constructor of a class ("") and its public methods and properties."""
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    fields: Parameters = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            value = REQUIRED if item.value is None else ast.unparse(item.value)
            if "init=False" not in value:
                fields[item.target.id] = "positional", value
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):  # a member of an enumeration
            fields[item.targets[0].id] = "positional", ast.unparse(item.value)
    yield "", of_function(methods["__init__"]) if "__init__" in methods else fields
    yield from ((f".{name}", of_function(method)) for name, method in methods.items() if not name.startswith("_"))


def theirs(folder: Path, files: dict[str, str]) -> dict[str, Parameters]:
    """The parameters of a release's calls by name, of a method after a dot; of an enumeration its members.

    Calls of a file that is not there are left out.
    """
    found: dict[str, Parameters] = {}
    for path, names in files.items():
        if not (folder / path).is_file():
            continue
        for node in ast.parse((folder / path).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name in names.split():
                found[node.name] = of_function(node)
            elif isinstance(node, ast.ClassDef) and node.name in names.split():
                found |= {f"{node.name}{method}": parameters for method, parameters in of_class(node)}
    return found


def shown(value: Any) -> str:
    """A default as a release writes it."""
    if value is inspect.Parameter.empty:
        return REQUIRED
    return f"{type(value).__name__}()" if dataclasses.is_dataclass(value) and value == type(value)() else repr(value)


def ours(library: str, call: str) -> Parameters | None:
    """The parameters of a call of ours; None if there is none, nothing of a property."""
    name, _, method = call.partition(".")
    found = getattr(OURS[library], name, None)
    if isinstance(found, enum.EnumType) and not method:
        return {member.name: ("positional", repr(member.value)) for member in found}
    if method:
        found = getattr(found, method, None)
        if found is not None and not callable(found):
            return {}
    if found is None:
        return None
    kinds = {inspect.Parameter.KEYWORD_ONLY: "named"}
    kinds |= dict.fromkeys((inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL), "rest")
    parameters = inspect.signature(inspect.unwrap(found)).parameters.values()
    return {
        one.name: (kinds.get(one.kind, "positional"), shown(one.default)) for one in parameters if one.name != "self"
    }


def differences(mine: Parameters | None, other: Parameters) -> Iterator[str]:
    """How a call of ours takes other arguments than that of a release."""
    if mine is None:
        yield "is not here"
        return
    yield from (f"lacks {name}" for name in other if name not in mine)
    yield from (f"adds {name}" for name in mine if name not in other)
    for name in mine.keys() & other.keys():
        if mine[name][1] != other[name][1]:
            yield f"{name} is {mine[name][1]}, not {other[name][1]}"
    here, there = ([name for name, (kind, _) in given.items() if kind == "positional"] for given in (mine, other))
    for place, pair in enumerate(zip(here, there, strict=False)):
        if pair[0] != pair[1]:
            yield f"at {place} {pair[0]}, not {pair[1]}"
            return
    if len(here) < len(there):
        yield f"by name alone from {there[len(here)]}"


def unread() -> Iterator[str]:
    """Parameters that no line of their function reads, and fields that no line of `ep_moe.functional` does.

    Functions that only make results of a shape (`_fake`) are left out, and names that begin with an underscore.
    """
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(functional.__path__[0]).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    words = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    words |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    owners = {id(item): f"{node.name}." for node in nodes if isinstance(node, ast.ClassDef) for item in node.body}
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and id(node) in owners:
            names = [] if node.target.id in words else [node.target.id]
            owner = owners[id(node)]
        elif isinstance(node, ast.FunctionDef) and "_fake" not in node.name:
            inner = [part for line in node.body for part in ast.walk(line) if isinstance(part, ast.Name)]
            read = {part.id for part in inner if isinstance(part.ctx, ast.Load)}
            names = [name for name in of_function(node) if name not in read]
            owner = f"{owners.get(id(node), '')}{node.name}."
        else:
            continue
        yield from (f"{owner}{name}" for name in names if not name.startswith("_"))


def fp4_call(num_rows: int, **options: Any) -> object:
    """FlashInfer's FP4 call, with so many rows of the first weight."""
    parameters, experts, width = ours("FlashInfer", "trtllm_fp4_block_scale_moe"), 4, 128
    assert parameters is not None
    given: dict[str, Any] = {name: None for name, (_, default) in parameters.items() if default == REQUIRED}
    for name, rows in (("gemm1", num_rows), ("gemm2", width)):
        given[f"{name}_weights"] = torch.zeros(experts, rows, width // 2, dtype=torch.uint8)
        given[f"{name}_weights_scale"] = torch.ones(experts, rows, width // 16).to(torch.float8_e4m3fn)
    given |= {"routing_logits": torch.zeros(2, experts), "hidden_states": torch.zeros(2, width, dtype=torch.bfloat16)}
    given |= {"num_experts": experts, "top_k": 1, "intermediate_size": width}
    return flashinfer.trtllm_fp4_block_scale_moe(
        **given | {"local_expert_offset": 0, "local_num_experts": experts} | options
    )


def batched_call(num_rows: int, activation: str) -> object:
    """vLLM's batched experts, with so many rows of the first weight."""
    x, w1, w2 = torch.zeros(2, 4, 128), torch.zeros(2, num_rows, 128), torch.zeros(2, 128, 128)
    ids, counts, nothing = torch.zeros(4, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32), (None,) * 6
    experts = vllm.BatchedTritonExperts(4, 1)
    return experts.apply(torch.empty_like(x), x, w1, w2, ids, activation, 2, None, *nothing, x, x, counts)


CALLS: dict[str, Callable[[int, Any], object]] = {
    "ActivationType": lambda rows, number: fp4_call(rows, activation_type=number),
    "RoutingMethodType": lambda rows, number: fp4_call(rows, routing_method_type=number),
    "MoEActivation": batched_call,
}


def computed(name: str, value: Any) -> bool:
    """Whether a member of an enumeration is computed, with or without a gate; False if it is refused."""
    for rows in (256, 128):
        try:
            CALLS[name](rows, value)
        except ValueError:
            continue
        return True
    return False


def wrong_members(name: str, members: Parameters, docs: str) -> Iterator[str]:
    """Members that are computed and said to be refused, or the other way round; numbers that have another meaning."""
    for member, (_, text) in members.items():
        value = ast.literal_eval(text)
        value = value[0] if isinstance(value, tuple) else value
        if computed(name, value) == (member in REFUSED[name].split()):
            yield f"{name}.{member} ({value}) is in REFUSED and computed, or neither"
        elif member not in REFUSED[name].split():
            meaning = {
                "ActivationType": f"{value} {member}" in docs,
                "RoutingMethodType": f"{value} {member.lower()}" in METHODS,
                "MoEActivation": f'"{value}"' in docs,
            }
            if not meaning[name]:
                yield f"{name}.{member} ({value}) has another name here, or none in docs/functional.md"


def compared(cache: Path, others: Mapping[str, str] | None = None) -> list[str]:
    """Unexplained differences.

    Args:
        cache: where releases are unpacked. others: versions that take the place of those of `SOURCES`, by wheel and
            version.
    """
    docs = (ROOT / "docs" / "functional.md").read_text(encoding="utf-8")
    found, wrong = set(), []
    for release, files in SOURCES.items():
        library, _, version = release.partition(" ")
        if version not in docs:
            wrong.append(f"docs/functional.md does not name {release}")
        version = (others or {}).get(f"{WHEELS[library]} {version}", version)
        calls = theirs(unpacked(WHEELS[library], version, cache), files)
        wrong += [f"{library} {version} has no {name}" for name in set(" ".join(files.values()).split()) - calls.keys()]
        for call, other in calls.items():
            if call.partition(".")[0] not in REFUSED:
                found |= {(call, difference) for difference in differences(ours(library, call), other)}
            elif "." not in call:
                wrong += wrong_members(call, other, docs)
    names = set(" ".join(itertools.chain(*(files.values() for files in SOURCES.values()))).split())
    found |= {(name, ALONE) for module in OURS.values() for name in module.__all__ if name not in names}
    explained = {(call, difference) for calls, difference, _ in EXPLAINED for call in calls.split()}
    ignored, silent = {name for names, _ in IGNORED for name in names.split()}, set(unread())
    wrong += [f"{call} {difference}" for call, difference in sorted(found - explained)]
    wrong += [f"{call} {difference}: explained, and no longer so" for call, difference in sorted(explained - found)]
    wrong += [f"{name} is not read" for name in sorted(silent - ignored)]
    return wrong + [f"{name} is said to be ignored, and is read" for name in sorted(ignored - silent)]


def main() -> int:
    """Compare; the exit code."""
    wrong = compared(Path(sys.argv[1]) if len(sys.argv) > 1 else cache_folder())
    print("\n".join(wrong) or f"signatures of {', '.join(SOURCES)}: no unexplained difference")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
