"""Conversion of transformers' experts modules to `ExpertWeights` and `ActivationConfig`, and back.

These are the modules under transformers' `use_experts_implementation`, with 3D parameters and flags for their layout.
Letters: E experts of the module, H hidden, I intermediate; W = 2I if the experts have a gate, else I.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ep_moe.config import DTYPES, ActivationConfig, ActivationKind
from ep_moe.engines.common.model import gate_above_up, gate_beside_up
from ep_moe.engines.transformers import fp8
from ep_moe.experts import apply_activation
from ep_moe.quant import StoredMatrix
from ep_moe.weights import ExpertWeights

ExpertsModule = Any  # a torch.nn.Module with `FLAGS` and the parameters that these describe
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
SHARDED = "_ep_moe_sharded"  # attribute of an experts module: its `ShardedExperts`
LOCAL = "_ep_moe_local"  # the same for its `LocalExperts`
ALPHA_NAMES, LIMIT_NAMES = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")  # attributes of an experts module


def is_experts(module: torch.nn.Module) -> bool:
    """True for a module that supports transformers' experts implementations."""
    return all(hasattr(module, flag) for flag in FLAGS)


def find_experts(model: torch.nn.Module) -> dict[str, ExpertsModule]:
    """The experts modules of a model by name, in order. Errors: ValueError if it has none. Local."""
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts that transformers lets another implementation compute")
    return found


def _gated_candidates(module: ExpertsModule) -> Iterator[ActivationConfig]:
    yield ActivationConfig(kind=ActivationKind.SILU)
    yield ActivationConfig(kind=ActivationKind.GELU)
    alpha, limit = _number(module, ALPHA_NAMES, 1.0), _number(module, LIMIT_NAMES, None)
    if limit is not None and not 0 < limit < math.inf:
        limit = None
    for beta in (1.0, 0.0):
        yield ActivationConfig(kind=ActivationKind.SWIGLU, alpha=alpha, beta=beta, limit=limit)


def _number(module: ExpertsModule, names: Sequence[str], default: Any) -> Any:
    """The first of these attributes that is a number; `activation_of` finds out whether the module uses it."""
    values = (getattr(module, name, None) for name in names)
    return next((float(value) for value in values if isinstance(value, int | float)), default)


def _probes() -> torch.Tensor:
    """Inputs [N] that distinguish activations: dense around 0, where they curve, and sparse up to 1000, for limits."""
    near = torch.linspace(-12, 12, 49, device="cpu", dtype=torch.float32)
    far = torch.logspace(1, 3, 17, device="cpu", dtype=torch.float32)
    return torch.cat([-far.flip(0), near, far])


def activation_of(module: ExpertsModule) -> ActivationConfig:
    """The activation of an experts module, found by running its own code on inputs up to 1000 and comparing.

    A limit above 1000, and a lower one of the gate where silu and gelu are within 1e-6 of zero, is not seen.
    Errors: ValueError names the module's class if no `ActivationConfig` gives the same results. Local.
    """
    probes = _probes()
    with torch.no_grad():
        if module.has_gate:
            gate, up = (grid.flatten() for grid in torch.meshgrid(probes, probes, indexing="ij"))
            ours = torch.cat([gate, up])
            theirs = module._apply_gate(ours[None] if module.is_concatenated else gate_beside_up(ours[None]))
            candidates = list(_gated_candidates(module))
            rounding = gate.abs() * (up.abs() + 1)  # a large `up` multiplies the rounding error of 1 + erf(gate)
        else:
            ours = probes
            theirs = module.act_fn(probes.unsqueeze(0))
            candidates = [ActivationConfig(kind=kind) for kind in (ActivationKind.RELU2, ActivationKind.IDENTITY)]
            rounding = torch.zeros_like(probes)
        theirs = theirs.squeeze(0).float()
        tolerance = 1e-5 * theirs.abs() + 1e-6 * (1 + rounding)
        for candidate in candidates:
            if bool(((apply_activation(ours, candidate) - theirs).abs() <= tolerance).all()):
                return candidate
    kinds = ", ".join(kind.value for kind in ActivationKind)
    raise ValueError(f"the activation of {type(module).__name__} (has_gate={module.has_gate}) is none of {kinds}")


def weights_of(module: ExpertsModule, experts: Sequence[int] | None = None) -> ExpertWeights:
    """Read the parameters of an experts module.

    Args:
        module: any values of `FLAGS` are supported, and weights in fp8 with their scales.
        experts: those to copy, in this order; None takes all, as views of the parameters that are in our memory order.
    Errors: ValueError names the unsupported flag or parameter. Local.
    """
    name = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{name} has has_post_expert_norm=True: a norm after each expert is not computed here")
    index = None if experts is None else torch.tensor(list(experts), dtype=torch.int64, device="cpu")
    scheme = fp8.scheme_of(module)
    if scheme.weight.quantized and (module.is_transposed or module.has_bias):
        raise ValueError(f"{name} has weights in fp8 that are transposed or have biases, which is not read here")

    def parameter(key: str) -> torch.Tensor:
        tensor = getattr(module, key)
        if hasattr(tensor, "to_local"):
            raise ValueError(f"{key} of {name} is a DTensor; it must be a tensor that is whole on this rank")
        if tensor.dtype not in DTYPES.values() and not scheme.weight.quantized:
            raise ValueError(f"{key} of {name} is {tensor.dtype}, not one of {', '.join(DTYPES)}")
        tensor = tensor.detach()
        return tensor if index is None else tensor.index_select(0, index.to(tensor.device))

    def matrix(key: str) -> torch.Tensor:
        return parameter(key).mT.contiguous() if module.is_transposed else parameter(key).contiguous()

    def in_our_order(rows: torch.Tensor) -> torch.Tensor:
        return rows if not module.has_gate or module.is_concatenated else gate_above_up(rows)

    first = fp8.first_of(module)
    if scheme.weight.quantized:
        w13, w2 = (fp8.matrix(module, key, parameter, scheme) for key in (first, "down_proj"))
        one, two = fp8.static_scales(module, w2.values.shape[0])
        return ExpertWeights(w13=w13, w2=w2, scheme=scheme, w13_input_scale=one, w2_input_scale=two)
    return ExpertWeights(
        w13=StoredMatrix(in_our_order(matrix(first))),
        w2=StoredMatrix(matrix("down_proj")),
        w13_bias=in_our_order(parameter(f"{first}_bias")) if module.has_bias else None,
        w2_bias=parameter("down_proj_bias") if module.has_bias else None,
    )


def parameters_of(module: ExpertsModule, weights: ExpertWeights) -> dict[str, torch.Tensor]:
    """The inverse of `weights_of` for unquantized experts, as views if the memory order is the same; of `module` only
    the flags are used. Returns: name -> [number of experts in `weights`, ...]. Local."""

    def in_their_order(rows: torch.Tensor) -> torch.Tensor:
        return rows if not module.has_gate or module.is_concatenated else gate_beside_up(rows)

    first = fp8.first_of(module)
    tensors = {first: in_their_order(weights.w13.values), "down_proj": weights.w2.values}
    if module.is_transposed:
        tensors = {name: matrix.mT.contiguous() for name, matrix in tensors.items()}
    if weights.w13_bias is not None and weights.w2_bias is not None:
        tensors |= {f"{first}_bias": in_their_order(weights.w13_bias), "down_proj_bias": weights.w2_bias}
    return tensors


def write_weights(module: ExpertsModule, weights: ExpertWeights) -> None:
    """Set an experts module's parameters to those that `parameters_of` returns for all E experts. Local."""
    for name, tensor in parameters_of(module, weights).items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def drop_parameters(module: ExpertsModule) -> None:
    """Remove the parameters of an experts module, so that they are freed or never allocated. Local."""
    for name in list(module._parameters):
        del module._parameters[name]


def are_views(weights: ExpertWeights, module: ExpertsModule) -> bool:
    """True if weights are views of the module's parameters, so that they see every write to them. Local."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in module.parameters(recurse=False)}
    return all(tensor.untyped_storage().data_ptr() in memory for tensor in weights.tensors())


def state_of(module: ExpertsModule) -> tuple[object, ...]:
    """A value that changes when parameters are replaced or moved, but not when they are written to. Local, no host
    sync."""
    return tuple(
        (name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for name, tensor in module.named_parameters(recurse=False)
    )
