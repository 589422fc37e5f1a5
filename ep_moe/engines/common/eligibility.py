"""What a layer computes, and whether we can: a layer that is not eligible stays on its engine's path."""

import dataclasses

import torch

from ep_moe.config import ALIGNMENT, DTYPES, ActivationConfig
from ep_moe.engines.common.formats import LoadedFormat
from ep_moe.experts import check_scheme, kernels_compute
from ep_moe.quant import QuantScheme


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """What a layer computes."""

    loaded: LoadedFormat
    activation: ActivationConfig

    @property
    def scheme(self) -> QuantScheme:
        """Of weights and payload."""
        return self.loaded.scheme


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """The sizes of a layer.

    Args:
        hidden: H. intermediate: I of one expert. num_experts: physical experts of all ranks. num_topk: K.
        dtype: of the tokens. max_num_tokens: the most rows that this rank sends in a step.
    """

    hidden: int
    intermediate: int
    num_experts: int
    num_topk: int
    dtype: torch.dtype
    max_num_tokens: int


def check_sizes(hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    """Raise ValueError for sizes or a dtype of tokens that no kernel here takes. Local."""
    if dtype not in DTYPES.values():
        raise ValueError(f"its tokens are {dtype}, not one of {', '.join(DTYPES)}")
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size % ALIGNMENT:
            raise ValueError(f"{name} ({size}) is no multiple of {ALIGNMENT}")


def check_kind(kind: LayerKind) -> None:
    """Raise ValueError unless we compute a kind of layer on the device that the model is made on. Local."""
    scheme, device = kind.scheme, torch.empty(0).device
    rows_share = scheme.weight.granularity == "tensor" or scheme.weight.block[0] > 1
    if kind.loaded.interleaved and rows_share:
        raise ValueError(f"its gate and up rows are interleaved and share scales in scheme '{scheme.name}'")
    if device.type != "cuda":
        return  # CPUs do all
    if not kernels_compute(scheme):
        raise ValueError(f"no kernels here compute scheme '{scheme.name}'")
    try:
        check_scheme(scheme, device)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
