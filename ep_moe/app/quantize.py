"""`ep-moe quantize`: write a model with its experts in a scheme, as a checkpoint that other engines read too."""

import time
from pathlib import Path
from typing import Any

from ep_moe.app.interrupts import raise_on_interrupt
from ep_moe.app.start import SHIPPED_MODEL


def quantize_model(model: str, scheme: str, out: str) -> dict[str, Any]:
    """Quantize the experts of a directory and write the whole model to another.

    Args:
        model: a Hugging Face directory, unquantized; "" is the shipped model. scheme: a name that `get_scheme` knows.
        out: the directory to write, absent or empty.
    Returns: the report: paths, scheme, layers, bytes of the experts before and after, seconds.
    Errors: ValueError as of `Checkpoint.open` and `write_quantized`. Local.
    """
    from ep_moe.quant import get_scheme
    from ep_moe.weights import Checkpoint
    from ep_moe.weights.writing import write_quantized

    raise_on_interrupt()
    start = time.perf_counter()
    checkpoint, directory = Checkpoint.open(model or SHIPPED_MODEL), Path(out)
    written = write_quantized(checkpoint, get_scheme(scheme), directory)
    return {
        "model": str(checkpoint.directory),
        "out": str(directory),
        "scheme": scheme,
        "layers": written.layers,
        "expert_bytes_before": written.bytes_before,
        "expert_bytes_after": written.bytes_after,
        "secs": time.perf_counter() - start,
    }
