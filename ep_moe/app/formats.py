"""`ep-moe formats`: the number formats of experts and tokens, by the names that --quant takes."""

from typing import Any

from ep_moe.experts.formats import kernels_compute
from ep_moe.names import EXPERTS_NAMES, SCHEME_NAMES
from ep_moe.quant import get_scheme
from ep_moe.quant.base import TensorFormat

_ROW = 7168  # elements, by which the scales' share of a weight's bits is counted


def list_formats() -> dict[str, Any]:
    """Each named scheme: how experts and tokens are stored, bits of a weight, which experts compute it. Local."""
    formats = []
    for name in SCHEME_NAMES:
        scheme = get_scheme(name)
        formats.append(
            {
                "name": name,
                "experts": _words(scheme.weight),
                "tokens": _words(scheme.payload),
                "weight_bits": _bits(scheme.weight),
                "by": [kind for kind in EXPERTS_NAMES if kind == "torch" or kernels_compute(scheme)],
            }
        )
    return {"formats": formats}


def _words(stored: TensorFormat) -> str:
    """A format in words, such as "e4m3 per block of 128x128"."""
    if not stored.quantized:
        return "the model's dtype"
    kind = str(stored.dtype).removeprefix("torch.").removeprefix("float8_").removesuffix("fn")
    if stored.packed > 1:
        kind = "e2m1" if stored.family == "micro" else "int4"
    block = f" of {'x'.join(map(str, stored.block))}" if stored.block != (1, 1) else ""
    return f"{kind} per {stored.granularity}{block}{', zero points' if stored.zero_point else ''}"


def _bits(stored: TensorFormat) -> float:
    """Bits of a weight, with the scales of a row; of what is not quantized, in 16 bits."""
    if stored.dtype is None:
        return 16.0
    scales = 0 if stored.granularity in ("tensor", "channel") else stored.num_groups(_ROW) / stored.block[0]
    return stored.dtype.itemsize * 8 / stored.packed + scales * stored.scale_dtype.itemsize * 8 / _ROW
