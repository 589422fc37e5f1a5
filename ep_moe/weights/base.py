"""The weights of one layer's local experts, in the one order that the whole runtime uses.

Letters: L local experts, H hidden, I intermediate; W = 2I where the activation is gated, else I.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch

from ep_moe.placement import Placement
from ep_moe.quant import SCHEMES, QuantScheme, get_scheme
from ep_moe.weights.checkpoint import Checkpoint
from ep_moe.weights.reading import read_experts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """Local experts of one layer; expert e here is physical expert `starts[rank] + e`.

    A gated `w13` is [gate; up]: rows [0, I) the gate, rows [I, 2I) the linear half.
    Quantized weights are the scheme's stored values, `scheme.row_values` of them in a row, with scales of its scale
    dtype that multiply them; where the scheme has global scales, each expert's matrix has one that multiplies it too
    (1 / g where a checkpoint stores a divisor g, as compressed-tensors' `weight_global_scale`).
    """

    w13: torch.Tensor  # [L, W, H]
    w2: torch.Tensor  # [L, H, I]
    scheme: QuantScheme = SCHEMES["none"]
    w13_scale: torch.Tensor | None = None  # tensor [L], channel [L, W], block [L, ceil(W/bn), ceil(H/bk)]
    w2_scale: torch.Tensor | None = None  # tensor [L], channel [L, H], block [L, ceil(H/bn), ceil(I/bk)]
    w13_global_scale: torch.Tensor | None = None  # [L] float32, where the scheme has them
    w2_global_scale: torch.Tensor | None = None  # [L] float32
    w13_bias: torch.Tensor | None = None  # [L, W]
    w2_bias: torch.Tensor | None = None  # [L, H]
    w13_input_scale: torch.Tensor | None = (
        None  # [1] float32, static activation scale of the first GEMM, scheme "tensor"
    )
    w2_input_scale: torch.Tensor | None = None  # [L] float32, the same for the second GEMM, one for each expert

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.w13.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        tensors = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path | Checkpoint,
        placement: Placement,
        rank: int,
        *,
        layers: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
        scheme: str | None = None,
        device: torch.device | str = "cpu",
    ) -> "dict[int, ExpertWeights]":
        """Read the experts of one rank from a Hugging Face directory: their bytes and no others.

        Beyond the result itself it holds one expert's matrix where it quantizes, and else a portion of 16 MiB, three
        where it dequantizes.

        Args:
            directory: config.json and model.safetensors, or several files and model.safetensors.index.json; a family
                of `ep_moe.weights.families.FAMILIES`, unquantized or with the fp8 of `ep_moe.weights.blocks`. Or that
                directory, opened.
            placement: of the model's E logical experts; rank: whose experts.
            layers: the MoE layers to read, by their number in the checkpoint; all of them by default.
            dtype: convert what is not quantized to it, tensor by tensor; by default each layer stays as it is on
                disk, and what is dequantized gets the dtype that config.json names, else float32.
            scheme: a name of `ep_moe.quant.SCHEMES`; by default that of each layer on disk, bit for bit. "none"
                dequantizes. Another one quantizes each expert on load, after the conversion to `dtype`, or from the
                dequantized float32 where it is quantized on disk.
            device: where the tensors shall be.
        Returns: layer -> weights, experts in the order of `placement.local_experts(rank)`.
        Errors: ValueError that names the tensor and file for one that is missing, misshapen, cut short, of a format
        that is not read or in two files; for an index that names an absent file, an unknown model_type or layer, a
        directory without safetensors, and a placement of another number of experts. Whatever is wrong with any
        expert of the chosen layers is raised on every rank.
        Local; synchronizes with `device`.
        """
        chosen = None if scheme is None else get_scheme(scheme)
        checkpoint = directory if isinstance(directory, Checkpoint) else Checkpoint.open(directory)
        experts = read_experts(checkpoint, placement, rank, scheme=chosen, layers=layers, dtype=dtype, device=device)
        return {layer: cls(**fields) for layer, fields in experts.items()}
