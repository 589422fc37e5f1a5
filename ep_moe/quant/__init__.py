"""Number formats of expert weights and tokens, in plain torch: what every kernel is compared with.

On a GPU activations are quantised by a kernel where scales are float32, with the same bits.
"""

from ep_moe.quant.base import Quantised, QuantScheme, as_bytes
from ep_moe.quant.formats import (
    FP8_CAPABILITY,
    SCHEMES,
    dequantise,
    dequantise_rows,
    dequantise_weight,
    get_scheme,
    payload_bytes,
    quantise,
    quantise_weight,
    round_trip,
    weight_scale_shape,
)

__all__ = [
    "FP8_CAPABILITY",
    "SCHEMES",
    "QuantScheme",
    "Quantised",
    "as_bytes",
    "dequantise",
    "dequantise_rows",
    "dequantise_weight",
    "get_scheme",
    "payload_bytes",
    "quantise",
    "quantise_weight",
    "round_trip",
    "weight_scale_shape",
]
