"""The public functions on tensors: each checks its arguments and calls the module of the format's family.

Plain torch, the reference for all kernels; on a GPU activations are quantized by a kernel, bitwise equal. No host sync,
safe in CUDA graphs.
Letters: T rows, H row width, G scale groups of a row, V stored values of a row, N and K rows and columns of a weight.
"""

from collections.abc import Mapping
from types import ModuleType

import torch

from ep_moe.quant import integer, micro, scaled
from ep_moe.quant.base import Quantized, QuantScheme, StoredMatrix, TensorFormat
from ep_moe.tensors import check_tensor

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES: dict[str, ModuleType] = {"scaled": scaled, "micro": micro, "integer": integer}
KERNEL_CAPABILITY = (8, 0)  # the first GPUs that kernels are compiled for; torch quantizes on any


def _family(stored: TensorFormat, scheme: QuantScheme) -> ModuleType:
    """The module that implements one of the scheme's formats."""
    if not stored.quantized:
        raise ValueError(f"scheme '{scheme.name}' has no quantized form")
    if stored.family not in FAMILIES:
        raise ValueError(f"scheme '{scheme.name}': family '{stored.family}' is not one of {', '.join(FAMILIES)}")
    return FAMILIES[stored.family]


def _require_floats(name: str, tensor: torch.Tensor, stored: TensorFormat, scheme: QuantScheme) -> None:
    check_tensor(tensor, name)
    if tensor.dtype not in _FLOATS:
        raise ValueError(f"{name} ({tensor.dtype}) must be float32, bfloat16 or float16")
    if tensor.dim() and tensor.shape[-1] % stored.packed:
        raise ValueError(
            f"scheme '{scheme.name}' stores {stored.packed} elements in one value, which does not divide the "
            f"{tensor.shape[-1]} elements of a row of {name}"
        )


def _require_stored(
    found: Mapping[str, torch.Tensor | None],
    needed: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    scheme: QuantScheme,
) -> None:
    """Check that the tensors found have the shapes and dtypes needed, and that those not needed are None."""
    for name, tensor in found.items():
        part = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if part != needed.get(name):
            raise ValueError(
                f"{name.replace('_', ' ')} is {part}, scheme '{scheme.name}' needs {needed.get(name)} "
                f"beside values {needed['values']}"
            )


def _check_rows(x: torch.Tensor, stored: TensorFormat, scheme: QuantScheme, static_scale: torch.Tensor | None) -> None:
    _require_floats("x", x, stored, scheme)
    if x.dim() != 2:
        raise ValueError(f"x {tuple(x.shape)} must have 2 dimensions")
    if static_scale is not None and stored.granularity != "tensor":
        raise ValueError(
            f"scheme '{scheme.name}' scales activations per {stored.granularity} and takes no static_scale"
        )
    if static_scale is not None and static_scale.numel() != 1:
        raise ValueError(f"static_scale {tuple(static_scale.shape)} must have 1 element")


def _quantize_rows(
    x: torch.Tensor, stored: TensorFormat, scheme: QuantScheme, static_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [T, H] to one of the scheme's formats: values [T, V] and scale [T, G]."""
    family = _family(stored, scheme)
    _check_rows(x, stored, scheme, static_scale)
    if x.is_cuda and torch.cuda.get_device_capability(x.device) >= KERNEL_CAPABILITY:
        # imported lazily: Triton exists only on Linux and is slow to import
        from ep_moe.quant import triton

        return triton.quantize(x, stored, static_scale)
    return family.quantize(x, stored, static_scale)


def quantize(x: torch.Tensor, scheme: QuantScheme, *, static_scale: torch.Tensor | None = None) -> Quantized:
    """Quantize activations in float32 arithmetic; values are rounded to nearest even.

    fp8 and int8 use scale = max(amax, 1e-10) / 448 or / 127, "fp8_block_ue8m0" the next power of two:
    `ep_moe.quant.scaled` has the rule, `ep_moe.quant.micro` that of "mxfp8" and "nvfp4". A row of "nvfp4" carries no
    global scale, so it is accurate only for groups of 16 whose largest magnitude is in [0.094, 2688].

    A row of zeros gives zeros. A NaN or infinity is not hidden: everything that shares its scale dequantizes to NaN.
    With a static scale a NaN stays a single NaN, and magnitudes above 448 * scale saturate, also infinity.

    Example: "fp8_block" on [T, 2880] gives scale [T, 23], strides (1, T); the last group has 64 columns. "nvfp4" gives
    values [T, 1440] uint8 and scale [T, 180] e4m3.

    Args:
        x: [T, H] float32, bfloat16 or float16, T may be 0; H even for "nvfp4".
        scheme: any with a quantized payload.
        static_scale: one float32 number > 0 on x's device instead of amax / 448, for activations scaled per tensor.
    Returns: values [T, V] contiguous and scale [T, G] with strides (1, T).
    Errors: ValueError for another dtype or shape, a scheme that is not quantized or takes no static scale. Local.
    """
    values, scale = _quantize_rows(x, scheme.payload, scheme, static_scale)
    return Quantized(values=values, scale=scale, scheme=scheme)


def dequantize(quantized: Quantized) -> torch.Tensor:
    """Turn activations [T, V] back into float32 [T, H]: stored value * scale, one multiplication. Local."""
    return dequantize_rows(quantized.values, quantized.scale, quantized.scheme)


def dequantize_rows(values: torch.Tensor, scale: torch.Tensor | None, scheme: QuantScheme) -> torch.Tensor:
    """Turn payload rows of any leading shape back into float32: stored value * scale, one multiplication.

    Args:
        values: [..., V] as the scheme's payload stores them; [..., H] in the model's dtype if it is not quantized.
        scale: [..., G] in the payload's scale dtype, any strides; None if it is not quantized.
    Returns: [..., H] float32; `values` itself if it is float32 already.
    Errors: ValueError if values and scale do not fit each other and the scheme. Local.
    """
    stored = scheme.payload
    if not stored.quantized:
        return values.float()
    groups = stored.num_groups(stored.row_width(values.shape[-1]))
    needed = {
        "values": (tuple(values.shape), stored.dtype or values.dtype),
        "scale": ((*values.shape[:-1], groups), stored.scale_dtype),
    }
    _require_stored({"values": values, "scale": scale}, needed, scheme)
    return _family(stored, scheme).dequantize_rows(values, scale, stored)


def round_trip(x: torch.Tensor, scheme: QuantScheme, *, static_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Quantize and dequantize rows in the scheme's activation format: the intermediate between the GEMMs.

    As `dequantize(quantize(x))` if the payload has the same format. If the format has a global scale, each row gets
    one, by the rule of weights: so the error is the format's own for rows of any magnitude.

    Args and errors: as of `quantize`.
    Returns: [T, H] float32. Local.
    """
    stored = scheme.activation
    if stored.global_scale != "none":
        _check_rows(x, stored, scheme, static_scale)
        return micro.round_trip(x, stored)
    values, scale = _quantize_rows(x, stored, scheme, static_scale)
    return _family(stored, scheme).dequantize_rows(values, scale, stored)


def quantize_weight(weight: torch.Tensor, scheme: QuantScheme) -> StoredMatrix:
    """Quantize weights by the rule of `quantize`; every leading index, such as an expert, has its own scales.

    Args:
        weight: [..., N, K] float32, bfloat16 or float16.
        scheme: any with quantized weights.
    Returns: what `scheme.weight.parts` describes.
    Errors: ValueError for another dtype or shape, or weights that are not quantized. Local.
    """
    family = _family(scheme.weight, scheme)
    _require_floats("weight", weight, scheme.weight, scheme)
    if weight.dim() < 2:
        raise ValueError(f"weight {tuple(weight.shape)} must have at least 2 dimensions")
    return family.quantize_weight(weight, scheme.weight)


def dequantize_weight(matrix: StoredMatrix, scheme: QuantScheme) -> torch.Tensor:
    """Turn weights back into float32: stored value * scale, times or divided by the global scale if there is one.

    Args:
        matrix: as `scheme.weight.parts` describes; values of any dtype if weights are not quantized.
    Returns: [..., N, K] float32; `matrix.values` itself if it is float32 and not quantized.
    Errors: ValueError if the tensors do not fit each other and the scheme. Local.
    """
    stored, values = scheme.weight, matrix.values
    shape = (*values.shape[:-1], stored.row_width(values.shape[-1]))
    needed = stored.parts(shape, values.dtype)
    _require_stored({name: getattr(matrix, name) for name in (*needed, *matrix.tensors)}, needed, scheme)
    if not stored.quantized:
        return values.float()
    real = _family(stored, scheme).dequantize_weight(matrix, stored)
    if matrix.global_scale is None:
        return real
    factor = matrix.global_scale[..., None, None]
    return real.div_(factor) if stored.global_scale == "divisor" else real.mul_(factor)


def payload_bytes(scheme: QuantScheme, hidden: int, dtype: torch.dtype) -> int:
    """Bytes of one token on the wire: its values and its scales.

    Example: "fp8_block" at hidden 7168 is 7168 + 56 * 4 = 7392 bytes, "mxfp8" too; "nvfp4" is 4032, "none" in
    bfloat16 14336.

    Args:
        hidden: H. dtype: the model's, that of the values if the scheme is not quantized.
    Local.
    """
    return scheme.payload.values_bytes(hidden, dtype) + scheme.payload.scale_bytes(hidden)
