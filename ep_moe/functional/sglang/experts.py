"""What SGLang's fused experts compute: the scheme and weights that its flags and scales describe, and the call.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts, W = 2I; N and C rows and columns of a weight, n and k
those of a block.
"""

import functools
import threading
from typing import NamedTuple

import torch

from ep_moe.config import DTYPES, ActivationConfig, ActivationKind
from ep_moe.functional.common import check_like, experts_for, kept_weights
from ep_moe.local_moe import local_moe
from ep_moe.quant import Quantized, QuantScheme, StoredMatrix, get_scheme, quantize, unpack_nibbles
from ep_moe.routing import Routing, apply_weights_to_input
from ep_moe.weights import ExpertWeights

FLAGS = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
_SUFFIXES = {torch.bfloat16: "", torch.float16: "_f16", torch.float32: "_f32"}  # by dtype of scales
_ONE_BYTE = (torch.uint8,)
_FLOAT = (torch.float32,)


class ExpertsCall(NamedTuple):
    """The arguments of `outplace_fused_experts`, in its order."""

    hidden_states: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    activation: str
    apply_router_weight_on_input: bool
    use_fp8_w8a8: bool
    use_int8_w8a8: bool
    use_int8_w8a16: bool
    use_int4_w4a16: bool
    per_channel_quant: bool
    w1_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    w1_zp: torch.Tensor | None
    w2_zp: torch.Tensor | None
    a1_scale: torch.Tensor | None
    a2_scale: torch.Tensor | None
    block_shape: list[int] | None
    no_combine: bool
    routed_scaling_factor: float | None
    gemm1_alpha: float | None
    gemm1_limit: float | None

    @property
    def between(self) -> ActivationConfig:
        """What lies between the GEMMs. Errors: ValueError for another name, and numbers that do not go with it."""
        if self.activation not in ("silu", "gelu"):
            raise ValueError(f"activation ({self.activation!r}) is not one of silu, gelu")
        if (self.gemm1_alpha is None) != (self.gemm1_limit is None):
            raise ValueError(f"gemm1_alpha ({self.gemm1_alpha}) and gemm1_limit ({self.gemm1_limit}) go together")
        if self.gemm1_alpha is None:
            return _plain(self.activation)
        if self.activation != "silu":
            raise ValueError(f"gemm1_alpha ({self.gemm1_alpha}) belongs to activation 'silu', not {self.activation!r}")
        return _swiglu(self.gemm1_alpha, self.gemm1_limit)

    @property
    def group(self) -> int:
        """Columns that share a scale of weights alone, 0 for one scale per row."""
        if self.block_shape is None:
            return 0
        rows, columns = self.block_shape
        if rows != 0 or columns < 0:
            raise ValueError(f"block_shape ({self.block_shape}) is not [0, columns of a group], for weights alone")
        return columns


@functools.cache
def _plain(name: str) -> ActivationConfig:
    return ActivationConfig(kind=ActivationKind(name))


@functools.lru_cache(maxsize=64)
def _swiglu(alpha: float, limit: float | None) -> ActivationConfig:
    return ActivationConfig(kind=ActivationKind.SWIGLU, alpha=float(alpha), beta=1.0, limit=limit)


def scheme_of(call: ExpertsCall) -> QuantScheme:
    """The scheme that flags, block shape and dtypes of scales describe. Errors: ValueError for those without one."""
    used = [flag for flag in FLAGS if getattr(call, flag)]
    if len(used) > 1:
        raise ValueError(f"{' and '.join(used)} are both set, one at most describes the weights")
    if call.block_shape is not None and len(call.block_shape) != 2:
        raise ValueError(f"block_shape ({call.block_shape}) is not [rows, columns]")
    if not used:
        _refuse(
            call, ("w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale", "block_shape"), "no use_* flag"
        )
        return get_scheme("none")
    for name in ("w1_scale", "w2_scale"):
        if getattr(call, name) is None:
            raise ValueError(f"{name} is missing, {used[0]} needs it")
    if used[0] in ("use_int8_w8a16", "use_int4_w4a16"):
        _refuse(call, ("a1_scale", "a2_scale"), used[0])
        return _weights_alone(call)
    _refuse(call, ("w1_zp", "w2_zp"), used[0])
    kind = used[0].removeprefix("use_").removesuffix("_w8a8")
    if call.block_shape is not None:
        _refuse(call, ("a1_scale", "a2_scale"), f"{used[0]} with a block_shape, which scales tokens in groups,")
        return get_scheme(f"{kind}_block_{call.block_shape[0]}x{call.block_shape[1]}")
    if kind == "int8":
        _refuse(call, ("a1_scale", "a2_scale"), used[0])
        if not call.per_channel_quant:
            raise ValueError("use_int8_w8a8 needs per_channel_quant or a block_shape")
        return get_scheme("int8_token")
    if not call.per_channel_quant:
        return get_scheme("fp8_tensor")
    if (call.a1_scale is None) != (call.a2_scale is None):
        raise ValueError("a1_scale and a2_scale go together in use_fp8_w8a8 with per_channel_quant")
    return get_scheme("fp8_token" if call.a1_scale is None else "fp8_tensor_channel")


def _refuse(call: ExpertsCall, names: tuple[str, ...], where: str) -> None:
    for name in names:
        if getattr(call, name) is not None:
            raise ValueError(f"{name} is given, {where} takes none")


def _weights_alone(call: ExpertsCall) -> QuantScheme:
    """int8_w8a16 and int4_w4a16, of which SGLang stores groups as unsigned integers around 128 or 8."""
    group, scale = call.group, call.w1_scale
    assert scale is not None
    if (call.w1_zp is None) != (call.w2_zp is None):
        raise ValueError("w1_zp and w2_zp go together")
    if scale.dtype not in _SUFFIXES:
        raise ValueError(f"w1_scale is {scale.dtype}; one of {', '.join(map(str, _SUFFIXES))} needed")
    groups = f"_g{group}" if group else ""
    suffix = _SUFFIXES[scale.dtype]
    if call.use_int4_w4a16:
        return get_scheme(f"int4_w4a16{groups}{'' if call.w1_zp is None else '_zp'}{suffix}")
    if not group:
        _refuse(call, ("w1_zp", "w2_zp"), "use_int8_w8a16 without groups")
        return get_scheme("int8_w8a16")
    return get_scheme(f"int8_w8a16{groups}_zp{suffix}")


def _scale(call: ExpertsCall, name: str, scheme: QuantScheme, shape: tuple[int, int, int]) -> torch.Tensor:
    """Scales of a weight [E, N, C] in our shape; SGLang's may have trailing dimensions of 1."""
    given: torch.Tensor = getattr(call, f"{name}_scale")
    needed, dtype = scheme.weight.scale_shape(shape), scheme.weight.scale_dtype
    if given.numel() != torch.Size(needed).numel() or [n for n in given.shape if n > 1] != [n for n in needed if n > 1]:
        raise ValueError(f"{name}_scale is {tuple(given.shape)}; {needed} needed for scheme '{scheme.name}'")
    return given.to(dtype).reshape(needed) if given.dtype != dtype else given.reshape(needed)


def _zero(call: ExpertsCall, name: str, scheme: QuantScheme, shape: tuple[int, int, int]) -> torch.Tensor | None:
    """Zero points of a weight [E, N, C] in a byte each, if the scheme has them. SGLang packs those of two rows."""
    if not scheme.weight.zero_point:
        return None
    needed, given = scheme.weight.scale_shape(shape), getattr(call, f"{name}_zp")
    if given is None:
        return torch.full(needed, 128, dtype=torch.uint8, device=call.w1.device)
    if call.use_int8_w8a16:
        check_like(given, f"{name}_zp", needed, _ONE_BYTE)
        return given
    packed = (needed[0], needed[1] // 2, *needed[2:])
    if given.numel() == torch.Size(packed).numel():
        given = given.reshape(packed)
    check_like(given, f"{name}_zp", packed, _ONE_BYTE)
    return unpack_nibbles(given.reshape(*packed[:2], -1).transpose(1, 2)).transpose(1, 2).reshape(needed)


def _matrix(call: ExpertsCall, name: str, scheme: QuantScheme, rows: int | None, columns: int) -> StoredMatrix:
    values, stored = getattr(call, name), scheme.weight
    dtype = stored.dtype or call.hidden_states.dtype
    needed = (call.w1.shape[0], values.shape[1] if rows is None else rows, stored.row_values(columns))
    if values.dim() != 3 or tuple(values.shape) != needed or values.dtype != dtype:
        raise ValueError(
            f"{name} is {tuple(values.shape)} {values.dtype}; {needed} {dtype} needed for scheme '{scheme.name}'"
        )
    values = values.view_as(values)  # an object of its own: what is kept may not keep the caller's alive
    if not stored.quantized:
        return StoredMatrix(values)
    shape = (needed[0], needed[1], columns)
    return StoredMatrix(values, scale=_scale(call, name, scheme, shape), zero=_zero(call, name, scheme, shape))


def _static(call: ExpertsCall, name: str, count: int) -> torch.Tensor | None:
    """A static activation scale, for `count` experts."""
    given = getattr(call, name)
    if given is None:
        return None
    if given.dtype != torch.float32 or given.numel() not in (1, count):
        raise ValueError(f"{name} is {tuple(given.shape)} {given.dtype}; one float32 number needed")
    return given.reshape(-1).expand(count).contiguous()


def weights_of(call: ExpertsCall, scheme: QuantScheme) -> ExpertWeights:
    """The weights of a call, checked; rows are copied into our order if gemm1_alpha says that gate and up alternate."""
    num_experts, hidden = call.w1.shape[0], call.hidden_states.shape[1]
    w13 = _matrix(call, "w1", scheme, None, hidden)
    intermediate, odd = divmod(call.w1.shape[1], 2)
    if odd:
        raise ValueError(f"w1 is {tuple(call.w1.shape)}; an even number of rows needed, a gate and an up half")
    w2 = _matrix(call, "w2", scheme, hidden, intermediate)
    biases = []
    for name, matrix in (("b1", w13), ("b2", w2)):
        bias, needed = getattr(call, name), tuple(matrix.values.shape[:2])
        if bias is not None:
            check_like(bias, name, needed, tuple(DTYPES.values()))
        biases.append(None if bias is None else bias.view_as(bias))
    if call.gemm1_alpha is not None:
        if scheme.weight.block[0] > 1:
            raise ValueError(
                f"gemm1_alpha is given, rows of gate and up alternate: a scale of {call.block_shape} has both"
            )
        alone = scheme.weight.granularity == "tensor"
        w13 = StoredMatrix(
            **{
                part: tensor if alone and part == "scale" else _in_halves(tensor)
                for part, tensor in w13.tensors.items()
            }
        )
        biases[0] = None if biases[0] is None else _in_halves(biases[0])
    return ExpertWeights(
        w13=w13,
        w2=w2,
        scheme=scheme,
        w13_bias=biases[0],
        w2_bias=biases[1],
        w13_input_scale=_static(call, "a1_scale", 1),
        w2_input_scale=_static(call, "a2_scale", num_experts),
    )


def _in_halves(rows: torch.Tensor) -> torch.Tensor:
    """[E, 2I, ...] of alternating rows as [gate; up]; bytes, since not every device indexes fp8."""
    stored = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    return torch.cat([stored[:, 0::2], stored[:, 1::2]], dim=1).view(rows.dtype)


def compute(call: ExpertsCall, out: torch.Tensor | None = None) -> torch.Tensor:
    """The weighted sum [T, H], or [T, K, H] if `no_combine`. Errors: ValueError. Local."""
    hidden_states, ids = call.hidden_states, call.topk_ids
    if hidden_states.dim() != 2 or hidden_states.dtype not in DTYPES.values():
        found = f"{tuple(hidden_states.shape)} {hidden_states.dtype}"
        raise ValueError(f"hidden_states are {found}; [tokens, hidden] of {', '.join(DTYPES)} needed")
    if ids.dim() != 2 or ids.shape[0] != hidden_states.shape[0] or call.topk_weights.shape != ids.shape:
        raise ValueError(
            f"topk_ids are {tuple(ids.shape)}, topk_weights {tuple(call.topk_weights.shape)}; both "
            f"({hidden_states.shape[0]}, K) needed beside hidden_states {tuple(hidden_states.shape)}"
        )
    activation, scheme = call.between, scheme_of(call)
    make = functools.partial(weights_of, call, scheme)
    if _has_copies(call, scheme):
        weights = make()
    else:
        tensors = call.w1, call.w1_scale, call.b1, call.w2, call.w2_scale, call.b2
        kept = kept_weights("sglang", threading.get_ident())
        weights = kept.get(tensors, (scheme.name, hidden_states.shape[1], hidden_states.dtype), make)
    routing_weights, factor = call.topk_weights.float(), call.routed_scaling_factor
    if factor is None or call.no_combine:
        factor = 1.0
    num_topk, x = ids.shape[1], hidden_states
    apart = num_topk > 1 and (call.no_combine or call.apply_router_weight_on_input)
    if apart:  # a row for each token and expert, summed afterwards
        x = x.repeat_interleave(num_topk, dim=0)
        ids, routing_weights = ids.reshape(-1, 1), routing_weights.reshape(-1, 1)
    tokens: torch.Tensor | Quantized = x
    if call.apply_router_weight_on_input:
        tokens = _weighted(call, x, Routing(topk_ids=ids, topk_weights=routing_weights), weights)
        routing_weights = torch.full_like(routing_weights, factor)
    elif factor != 1.0:
        routing_weights = routing_weights * factor
    routing = Routing(topk_ids=ids, topk_weights=routing_weights)
    experts = experts_for(activation, scheme, hidden_states.device)
    y = local_moe(tokens, routing, weights, experts, dtype=hidden_states.dtype, out=None if apart else out)
    if not apart:
        return y.unsqueeze(1) if call.no_combine else y
    y = y.view(-1, num_topk, y.shape[1])
    if call.no_combine:
        return y
    return torch.sum(y.float(), 1).to(y.dtype) if out is None else out.copy_(torch.sum(y.float(), 1))


def _has_copies(call: ExpertsCall, scheme: QuantScheme) -> bool:
    """Whether `weights_of` makes copies, which would miss later writes to the caller's tensors."""
    scales = [scale for scale in (call.w1_scale, call.w2_scale) if scale is not None]
    converted = any(scale.dtype != scheme.weight.scale_dtype or not scale.is_contiguous() for scale in scales)
    static = call.a1_scale is not None or call.a2_scale is not None
    return converted or static or call.gemm1_alpha is not None or scheme.weight.zero_point


def _weighted(call: ExpertsCall, x: torch.Tensor, routing: Routing, weights: ExpertWeights) -> torch.Tensor | Quantized:
    """Tokens multiplied by their weights, where SGLang multiplies the first GEMM's results."""
    if call.b1 is not None:
        raise ValueError("b1 is given, apply_router_weight_on_input takes none: SGLang would multiply it too")
    scheme, tokens = weights.scheme, x
    if not scheme.payload.quantized:
        return apply_weights_to_input(tokens, routing)[0]
    return apply_weights_to_input(quantize(x, scheme, static_scale=weights.w13_input_scale), routing)[0]
