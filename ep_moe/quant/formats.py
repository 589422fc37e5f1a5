"""The schemes by name, and the public functions: they check their arguments and call the scheme's family.

Plain torch, the reference for all kernels; on a GPU activations are quantized by a kernel, bitwise equal. No host sync,
safe in CUDA graphs.
Letters: T rows, H row width, G scale groups of a row, V stored values of a row, N and K rows and columns of a weight.
"""

from types import ModuleType

import torch

from ep_moe.quant import micro, scaled
from ep_moe.quant.base import Quantized, QuantScheme

FP8_CAPABILITY = (8, 9)  # the first GPUs for which Triton casts to fp8; torch casts on any

SCHEMES: dict[str, QuantScheme] = {
    "none": QuantScheme(name="none"),
    **scaled.SCALED_SCHEMES,
    **micro.MICRO_SCHEMES,
}


def get_scheme(name: str) -> QuantScheme:
    """Find a scheme by name: one of `SCHEMES`, or "fp8_block_<n>x<k>" for weight blocks of n rows and k columns.

    Errors: ValueError that lists the known names, or the valid n and k. Local.
    """
    scheme = SCHEMES.get(name) or scaled.parse_block_scheme(name)
    if scheme is None:
        raise ValueError(f"scheme ({name!r}) is not one of {', '.join(SCHEMES)}, fp8_block_<n>x<k>")
    return scheme


def _family(scheme: QuantScheme) -> ModuleType:
    """The module that implements a scheme, chosen by the dtype of its scales."""
    if scheme.dtype is None:
        raise ValueError(f"scheme '{scheme.name}' has no quantized form")
    return scaled if scheme.scale_dtype == torch.float32 else micro


def _require_floats(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(f"{name} ({tensor.dtype}) must be float32, bfloat16 or float16")


def _require_stored(
    values: torch.Tensor, scale: torch.Tensor | None, scale_shape: tuple[int, ...], scheme: QuantScheme
) -> None:
    """Check that values and scale have the scheme's dtypes, and that scale has `scale_shape`."""
    if values.dtype != scheme.dtype:
        raise ValueError(f"values are {values.dtype}, scheme '{scheme.name}' stores {scheme.dtype}")
    if scale is None or tuple(scale.shape) != scale_shape or scale.dtype != scheme.scale_dtype:
        given = None if scale is None else f"{tuple(scale.shape)} {scale.dtype}"
        raise ValueError(
            f"scale is {given}, scheme '{scheme.name}' on values {tuple(values.shape)} "
            f"needs {scale_shape} {scheme.scale_dtype}"
        )


def _require_global_scale(global_scale: torch.Tensor | None, shape: tuple[int, ...], scheme: QuantScheme) -> None:
    """Check that there is a global scale of `shape` if the scheme has them, else none."""
    found = None if global_scale is None else (tuple(global_scale.shape), global_scale.dtype)
    needed = (shape, torch.float32) if scheme.weight_global_scale else None
    if found != needed:
        raise ValueError(f"global scale is {found}, scheme '{scheme.name}' needs {needed}")


def _check_rows(x: torch.Tensor, scheme: QuantScheme, static_scale: torch.Tensor | None) -> None:
    _require_floats("x", x)
    if x.dim() != 2:
        raise ValueError(f"x {tuple(x.shape)} must have 2 dimensions")
    if static_scale is not None and scheme.activation != "tensor":
        raise ValueError(f"scheme '{scheme.name}' scales activations per {scheme.activation} and takes no static_scale")
    if static_scale is not None and static_scale.numel() != 1:
        raise ValueError(f"static_scale {tuple(static_scale.shape)} must hold 1 number")


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
        scheme: any that is quantized.
        static_scale: one float32 number > 0 on x's device instead of amax / 448, for activations scaled per tensor.
    Returns: values [T, V] contiguous and scale [T, G] with strides (1, T).
    Errors: ValueError for another dtype or shape, a scheme that is not quantized or takes no static scale. Local.
    """
    family = _family(scheme)
    _check_rows(x, scheme, static_scale)
    if family is scaled and x.is_cuda and torch.cuda.get_device_capability(x.device) >= FP8_CAPABILITY:
        # imported lazily: Triton exists only on Linux and is slow to import
        from ep_moe.quant import triton

        return triton.quantize(x, scheme, static_scale)
    return family.quantize(x, scheme, static_scale)


def dequantize(quantized: Quantized) -> torch.Tensor:
    """Turn activations [T, V] back into float32 [T, H]: stored value * scale, one multiplication. Local."""
    return dequantize_rows(quantized.values, quantized.scale, quantized.scheme)


def dequantize_rows(values: torch.Tensor, scale: torch.Tensor | None, scheme: QuantScheme) -> torch.Tensor:
    """Turn rows of any leading shape back into float32: stored value * scale, one multiplication.

    Args:
        values: [..., V] as the scheme stores them; [..., H] in the model's dtype under a scheme that is not quantized.
        scale: [..., G] in the scheme's scale dtype, any strides; None under a scheme that is not quantized.
    Returns: [..., H] float32; `values` itself if it is float32 already.
    Errors: ValueError if values and scale do not fit each other and the scheme. Local.
    """
    if not scheme.quantized:
        return values.float()
    groups = scheme.num_groups(scheme.row_width(values.shape[-1]))
    _require_stored(values, scale, (*values.shape[:-1], groups), scheme)
    return _family(scheme).dequantize_rows(values, scale, scheme)


def round_trip(x: torch.Tensor, scheme: QuantScheme, *, static_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Quantize and dequantize rows that are not sent, such as the intermediate between the GEMMs.

    As `dequantize(quantize(x))`, but if the scheme's weights have a global scale, each row gets one too, by the same
    rule: so the error is the format's own for rows of any magnitude.

    Args and errors: as of `quantize`.
    Returns: [T, H] float32. Local.
    """
    if not scheme.weight_global_scale:
        return dequantize(quantize(x, scheme, static_scale=static_scale))
    _check_rows(x, scheme, static_scale)
    return micro.round_trip(x, scheme)


def weight_scale_shape(shape: tuple[int, ...], scheme: QuantScheme) -> tuple[int, ...]:
    """The shape of a weight's scales, for a weight of `shape` [..., N, K], stored as [..., N, V].

    Returns: per tensor [...], per channel [..., N], per block [..., ceil(N/n), ceil(K/k)].
    Errors: ValueError for a scheme that is not quantized. Local.
    """
    _family(scheme)
    return scheme.weight_scale_shape(shape)


def quantize_weight(
    weight: torch.Tensor, scheme: QuantScheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantize weights by the rule of `quantize`; every leading index, such as an expert, has its own scales.

    Args:
        weight: [..., N, K] float32, bfloat16 or float16.
        scheme: any that is quantized.
    Returns: values [..., N, V]; scale of `weight_scale_shape` in the scheme's scale dtype; global scale [...] float32
        if the scheme has `weight_global_scale`, else None.
    Errors: ValueError for another dtype or shape, or a scheme that is not quantized. Local.
    """
    family = _family(scheme)
    _require_floats("weight", weight)
    if weight.dim() < 2:
        raise ValueError(f"weight {tuple(weight.shape)} must have at least 2 dimensions")
    return family.quantize_weight(weight, scheme)


def dequantize_weight(
    values: torch.Tensor, scale: torch.Tensor | None, scheme: QuantScheme, global_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Turn weights back into float32: stored value * scale, times the global scale if the scheme has one.

    Args:
        values: [..., N, V] as the scheme stores them; [..., N, K] in the model's dtype under a scheme that is not
            quantized.
        scale: of `weight_scale_shape` in the scheme's scale dtype; None under a scheme that is not quantized.
        global_scale: [...] float32 if the scheme has `weight_global_scale`, else None.
    Returns: [..., N, K] float32; `values` itself if it is float32 already.
    Errors: ValueError if values and scale do not fit each other and the scheme. Local.
    """
    _require_global_scale(global_scale, tuple(values.shape[:-2]), scheme)
    if not scheme.quantized:
        return values.float()
    shape = (*values.shape[:-1], scheme.row_width(values.shape[-1]))
    _require_stored(values, scale, scheme.weight_scale_shape(shape), scheme)
    real = _family(scheme).dequantize_weight(values, scale, scheme)
    return real if global_scale is None else real.mul_(global_scale[..., None, None])


def payload_bytes(scheme: QuantScheme, hidden: int, dtype: torch.dtype) -> int:
    """Bytes of one token on the wire: its values and its scales.

    Example: "fp8_block" at hidden 7168 is 7168 + 56 * 4 = 7392 bytes, "mxfp8" too; "nvfp4" is 4032, "none" in
    bfloat16 14336.

    Args:
        hidden: H. dtype: the model's, that of the values if the scheme is not quantized.
    Local.
    """
    return scheme.values_bytes(hidden, dtype) + scheme.scale_bytes(hidden)
