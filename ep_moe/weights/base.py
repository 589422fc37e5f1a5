"""The weights of one layer's local experts, in the memory order of the whole runtime.

Letters: L local experts, H hidden, I intermediate; W = 2I if the activation is gated, else I.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from ep_moe.config import DTYPES
from ep_moe.fields import shown
from ep_moe.logs import log_step
from ep_moe.placement import Placement
from ep_moe.quant import SCHEMES, QuantScheme, StoredMatrix, get_scheme
from ep_moe.tensors import check_tensor
from ep_moe.weights.checkpoint import Checkpoint
from ep_moe.weights.reading import read_layer
from ep_moe.weights.storage import TensorReader


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PerExpert:
    """Constants of each expert, [L] float32; None leaves one out.

    Args:
        alpha, beta, limit: of the activation, in place of `ActivationConfig`'s; a limit of infinity is none.
        w13_output_scale: multiplies the sums of the first GEMM before the bias: of the up half, if there are two.
        w13_gate_output_scale: the same for the gate half, which not every activation has.
        w2_output_scale: the same for the second GEMM.
    """

    alpha: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    limit: torch.Tensor | None = None
    w13_output_scale: torch.Tensor | None = None
    w13_gate_output_scale: torch.Tensor | None = None
    w2_output_scale: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are set, by name."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


class _Referable:
    """Allows weak references to a dataclass with slots: caches of launches are dropped with their weights."""

    __slots__ = ("__weakref__",)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights(_Referable):
    """Local experts of one layer; local expert e is physical expert `starts[rank] + e`.

    A gated `w13` is [gate; up]: rows [0, I) the gate, rows [I, 2I) the linear half; with `up_first` it is [up; gate],
    the order of FlashInfer; with `alternating` gate and up rows take turns, gate first, as gpt-oss publishes them. The
    rows of `w13_bias` have the same order.
    `scheme.weight` describes both matrices; `StoredMatrix(tensor)` is an unquantized one.
    Errors: ValueError for a matrix that is not a `StoredMatrix` of 3 dimensions, matrices of different numbers of
    experts, and a `w13_order` of another shape or dtype, or with columns that are not in [0, H).
    """

    w13: StoredMatrix  # [L, W, H]
    w2: StoredMatrix  # [L, H, I]
    scheme: QuantScheme = SCHEMES["none"]
    w13_bias: torch.Tensor | None = None  # [L, W]
    w2_bias: torch.Tensor | None = None  # [L, H]
    w13_input_scale: torch.Tensor | None = None  # [1] float32, static, of the first GEMM's tokens, per tensor
    w2_input_scale: torch.Tensor | None = None  # [L] float32, the same for the second GEMM, one for each expert
    per_expert: PerExpert = PerExpert()
    up_first: bool = False
    alternating: bool = False
    # [L, H] int64: column k of an expert's w13 multiplies column w13_order[k] of its tokens; None: column k
    w13_order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, matrix in (("w13", self.w13), ("w2", self.w2)):
            if not isinstance(matrix, StoredMatrix):
                raise ValueError(f"{name} ({type(matrix).__name__}) must be a StoredMatrix")
            if matrix.values.dim() != 3:
                raise ValueError(
                    f"{name} is {tuple(matrix.values.shape)}, expected 3 dimensions: [experts, rows, columns]"
                )
        if not isinstance(self.scheme, QuantScheme):
            raise ValueError(f"scheme ({shown(self.scheme)}) is not a QuantScheme")
        if self.w13.values.shape[0] != self.w2.values.shape[0]:
            raise ValueError(f"w13 has {self.w13.values.shape[0]} experts, w2 has {self.w2.values.shape[0]}")
        if self.w13_order is not None:
            self._check_order(self.w13_order)

    def _check_order(self, order: torch.Tensor) -> None:
        check_tensor(order, "w13_order")
        hidden = self.scheme.weight.row_width(self.w13.values.shape[2])
        shape = self.num_local_experts, hidden
        if tuple(order.shape) != shape or order.dtype != torch.int64:
            raise ValueError(f"w13_order is {tuple(order.shape)} {order.dtype}, expected {shape} torch.int64")
        if order.numel() and not order.is_meta:
            least, most = (int(number) for number in order.aminmax())
            if least < 0 or most >= hidden:
                raise ValueError(f"w13_order has columns from {least} to {most}, not in [0, hidden ({hidden}))")

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.w13.values.shape[0]

    @property
    def num_bytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    @property
    def optional(self) -> tuple[torch.Tensor | None, ...]:
        """Biases, static scales and the order of w13, None for those that are not set."""
        return self.w13_bias, self.w2_bias, self.w13_input_scale, self.w2_input_scale, self.w13_order

    @property
    def named_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that are set, by name. Example: "w13", "w13_scale", "w2", "w2_scale", "w13_bias"."""
        named = {
            name if part == "values" else f"{name}_{part}": tensor
            for name, matrix in (("w13", self.w13), ("w2", self.w2))
            for part, tensor in matrix.tensors.items()
        }
        names = ("w13_bias", "w2_bias", "w13_input_scale", "w2_input_scale", "w13_order")
        optional = zip(names, self.optional, strict=True)
        return named | {name: tensor for name, tensor in optional if tensor is not None} | self.per_expert.tensors

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors that are set."""
        yield from self.named_tensors.values()

    def refit(self, source: "ExpertWeights") -> None:
        """Overwrite these weights with others of the same scheme and shapes, in place and without new buffers.

        Layers that hold these weights compute with the new ones from then on, and so do captured CUDA graphs.

        Args:
            source: the same tensors with the same shapes and dtypes, on any device.
        Errors: ValueError names the scheme, the order of w13's rows, or the first tensor that differs; nothing is
        copied then. Local, on the current stream, like any other copy.
        """
        if source.scheme != self.scheme:
            raise ValueError(
                f"weights in scheme '{self.scheme.name}' are refitted with weights in '{source.scheme.name}'"
            )
        if (source.up_first, source.alternating) != (self.up_first, self.alternating):
            raise ValueError(
                f"w13 of the new weights is up_first {source.up_first} and alternating {source.alternating}, of these "
                f"{self.up_first} and {self.alternating}"
            )
        mine, theirs = self.named_tensors, source.named_tensors
        for name in (*mine, *(theirs.keys() - mine.keys())):
            found, needed = (
                None if name not in tensors else (tuple(tensors[name].shape), tensors[name].dtype)
                for tensors in (theirs, mine)
            )
            if found != needed:
                raise ValueError(f"{name} of the new weights is {found}, these have {needed}")
        for name, tensor in mine.items():
            if tensor.data_ptr() != theirs[name].data_ptr():
                tensor.copy_(theirs[name])

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path | Checkpoint,
        placement: Placement | Mapping[int, Placement],
        rank: int,
        *,
        layers: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
        scheme: str | None = None,
        device: torch.device | str = "cpu",
    ) -> "dict[int, ExpertWeights]":
        """Read the experts of one rank from a Hugging Face directory; no other tensor data is read.

        Peak memory beyond the result: one expert's matrix if it quantizes or unpacks integers, else a portion of
        16 MiB, or three if it dequantizes.

        Args:
            directory: config.json and model.safetensors, or several files and model.safetensors.index.json; a family
                of `ep_moe.weights.families.FAMILIES`, unquantized or as `ep_moe.weights.methods` reads it. Or the
                `Checkpoint` of such a directory.
            placement: of the model's E logical experts, or that of each layer; rank: the one whose experts are read.
            layers: the MoE layers to read, by their number in the checkpoint; by default all that config.json has.
            dtype: convert unquantized tensors to it, one by one; by default each layer keeps its dtype on disk, and
                dequantized tensors get the dtype that config.json names, else float32.
            scheme: a name of `ep_moe.quant.SCHEMES`; by default that of each layer on disk, bit for bit. "none"
                dequantizes. Another one quantizes each expert on load, after the conversion to `dtype`, or from the
                dequantized float32 if it is quantized on disk.
            device: of the resulting tensors.
        Returns: layer -> weights, experts in the order of `placement.local_experts(rank)`.
        Errors: ValueError that names tensor and file if a tensor is missing, has a wrong shape, is truncated, has an
        unsupported format or is in two files; for an index that names an absent file, an unknown model_type or layer,
        a directory without safetensors, and a placement of another number of experts. Errors in any expert of the
        chosen layers are raised on every rank, but for those that only the data of quantized weights show.
        Local; synchronizes with `device`.
        """
        chosen = None if scheme is None else get_scheme(scheme)
        checkpoint = directory if isinstance(directory, Checkpoint) else Checkpoint.open(directory)
        directory = checkpoint.directory
        for each in (placement,) if isinstance(placement, Placement) else placement.values():
            if each.num_experts != checkpoint.config.num_experts:
                raise ValueError(
                    f"the placement has {each.num_experts} experts, {directory} has {checkpoint.config.num_experts}"
                )
        if dtype is not None and dtype not in DTYPES.values():
            raise ValueError(f"dtype ({dtype}) is not one of {', '.join(DTYPES)}")
        numbers = list(checkpoint.all_layers() if layers is None else layers)
        unknown = [layer for layer in numbers if layer not in checkpoint.layers]
        if unknown:
            raise ValueError(f"layer {unknown[0]} of {directory} has no experts; layers {list(checkpoint.layers)} have")
        stored_dtypes = {layer: checkpoint.check_layer(layer) for layer in numbers}
        found = {}
        with TensorReader() as reader:
            for layer in numbers:
                stored = checkpoint.layer_scheme(layer)
                experts = (placement if isinstance(placement, Placement) else placement[layer]).local_experts(rank)
                of_layer = dtype or (checkpoint.dtype if stored.weight.quantized else stored_dtypes[layer])
                fields = read_layer(checkpoint, reader, layer, experts, of_layer, chosen or stored, device)
                found[layer] = cls(per_expert=PerExpert(**fields.pop("constants", {})), **fields)
                log_step("layers of experts read", len(found), len(numbers), found[layer].num_bytes)
        return found
