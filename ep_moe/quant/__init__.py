"""Number formats of expert weights and tokens, in plain torch: the reference for every kernel.

On a GPU, activations are quantized by a kernel, bitwise equal.
"""

from ep_moe.quant.base import Quantized, QuantScheme, StoredMatrix, TensorFormat, as_bytes
from ep_moe.quant.formats import (
    KERNEL_CAPABILITY,
    dequantize,
    dequantize_rows,
    dequantize_weight,
    payload_bytes,
    quantize,
    quantize_weight,
    round_trip,
)
from ep_moe.quant.integer import pack_nibbles, unpack_nibbles
from ep_moe.quant.schemes import SCHEMES, get_scheme, with_block

__all__ = [
    "KERNEL_CAPABILITY",
    "SCHEMES",
    "QuantScheme",
    "Quantized",
    "StoredMatrix",
    "TensorFormat",
    "as_bytes",
    "dequantize",
    "dequantize_rows",
    "dequantize_weight",
    "get_scheme",
    "pack_nibbles",
    "payload_bytes",
    "quantize",
    "quantize_weight",
    "round_trip",
    "unpack_nibbles",
    "with_block",
]
