"""`pack_routed` as repeated launches into one allocation, with quantization before it and the weighted sum behind it.

Letters: N tokens, K top-k, H hidden, V stored values of a row, G scale groups, L local experts.
"""

import dataclasses
from typing import Any

import torch
import triton

from ep_moe.config import Layout
from ep_moe.kernel_launch.allocation import allocator
from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.kernels.rows.permute import Placed, Places
from ep_moe.layout.base import Batched, BatchTemplate, Compact, ExpertBatch, PackingSizes, TokenRows, packable
from ep_moe.layout.frame import Frame, make_frame
from ep_moe.layout.triton import (
    CopyShape,
    PlaceShape,
    Step,
    are_few,
    block_tokens,
    copy_launch,
    place_launches,
    prepare_weighted_sum,
    weighted_sum,
)
from ep_moe.quant import Quantized
from ep_moe.quant.triton import QuantizeShape, largest_or_scale, quantize_launch

PLACED = Placed("ids", "weights", "local_ids", "topk_weights", "before", "expert_num_tokens", "expert_row_start")
QUANTIZED = ("tokens", "number", "values", "values_scale:bytes")  # names of the launches' tensors, in their order


class RoutedPacking:
    """Packs the tokens of this rank for inputs of one kind: their shapes, strides and dtypes are those of a first one.

    In layout FLAT rows are not copied, only listed; the batches are COMPACT ones with a `row_index`, summed here.

    Args:
        x: [N, H], or `Quantized`. topk_ids, topk_weights: [N, K]. Nothing is kept of them but their kind.

    Attributes:
        template: of the batches, whose memory also has what the sum of their results needs.
        sequence: the launches, over `inputs`: of `quantizing`, if tokens are quantized, of `placing`, and others.
        names: of the sequence's tensors that a batch consists of, by their names in `PreparedCall`.
        placing: the launch that merges repeats and counts; None if that takes several.
        quantizing: the launch that quantizes tokens, None if there is none.
        copying: the launch that copies few tokens to their rows, which that of `placing` could do, too; None if not.
        new_result: allocates what `weighted_sum` returns.
        device: of all tensors. ids_dtype: of `topk_ids`.
    Errors: ValueError unless `packable`. Local; nothing is launched.
    """

    def __init__(
        self, x: torch.Tensor | Quantized, topk_ids: torch.Tensor, topk_weights: torch.Tensor, sizes: PackingSizes
    ) -> None:
        if not packable(x, topk_ids, topk_weights, sizes):
            raise ValueError(f"tokens for layout {sizes.layout.value} are empty, or their rows have gaps")
        (num_tokens, num_topk), self.device = topk_ids.shape, topk_ids.device
        self.ids_dtype = topk_ids.dtype
        self._sizes, together = sizes, sizes.tokens_in_sum
        self._summed = torch.Size((num_tokens // together, num_topk * together))
        values, scale = (x.values, x.scale) if isinstance(x, Quantized) else (x, None)
        self._hidden = x.hidden if isinstance(x, Quantized) else x.shape[1]
        self._quantizes = scale is None and sizes.scheme.payload.quantized
        whole = sizes.static or sizes.scheme.payload.granularity == "tensor"
        self._number = self._quantizes and whole  # quantization takes a number, `largest_or_scale`
        self._pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._launches: list[Step] = []
        self.placing: PlaceShape | None = None
        self.quantizing: QuantizeShape | None = None
        self.copying: CopyShape | None = None
        source = "tokens"
        if self._quantizes:
            source = "values"
            values, scale = self._quantize(values)
        rows = TokenRows(
            x=_shape_of(values),
            scale=None if scale is None else _shape_of(scale),
            local_topk_ids=torch.empty(num_tokens, num_topk, dtype=torch.int32, device="meta"),
            topk_weights=torch.empty(num_tokens, num_topk, dtype=torch.float32, device="meta"),
        )
        experts, capacity = sizes.num_local_experts, sizes.capacity
        frame = make_frame(rows, sizes.layout, num_local_experts=experts, capacity=capacity)
        self._place(frame, topk_ids, topk_weights)
        self.names = {"row_start": "expert_row_start", "num_tokens": "expert_num_tokens"}
        fields = {"scheme": sizes.scheme, "dtype": sizes.dtype, "expected_rows": sizes.expected_rows}
        self._where_they_are: dict[str, str] = {}  # fields of a batch whose tensors are not copied
        if sizes.layout is Layout.FLAT:
            self._list(frame, rows)
            self.names |= {"x": source, "x_scale": f"{source}_scale", "row_index": "row_index"}
            self._where_they_are = {"x": source} if scale is None else {"x": source, "scale": f"{source}_scale"}
        else:
            shape = self._copy(frame, rows, source)
            if sizes.layout is Layout.COMPACT and isinstance(x, torch.Tensor) and are_few(topk_ids.shape):
                self.copying = shape
            self.names |= {"x": "x", "x_scale": "scale"}
            fields["row_index"] = None
        if scale is None:
            fields["scale"] = None
        aliases = {f"{name}:words": (name, torch.int32) for name in (source, "x")}
        if scale is not None:  # Triton has no e8m0
            kept = torch.uint8 if scale.dtype.itemsize == 1 else scale.dtype
            aliases |= {f"{name}:bytes": (name, kept) for name in (f"{source}_scale", "scale")}
        scaled, number = ["tokens_scale"] * isinstance(x, Quantized), ["number"] * self._number
        names = "tokens", *scaled, "ids", "weights", *number
        self.sequence = LaunchSequence(self._launches, names, self._pieces, self.device, aliases=aliases)
        kind = Batched if sizes.layout is Layout.BATCHED else Compact
        self.template = BatchTemplate(kind, object(), fields, self.sequence.workspace, tuple(self._where_they_are))
        self.new_result = allocator((self._summed[0], self._hidden), (self._hidden, 1), sizes.dtype, self.device)
        self._sums: dict[object, Kernel] = {}

    def _quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the launch that quantizes; returns the values and scales as meta tensors."""
        stored, (num_tokens, hidden) = self._sizes.scheme.payload, x.shape
        assert stored.dtype is not None
        self._pieces["values"] = (num_tokens, stored.row_values(hidden)), stored.dtype
        self._pieces["values_scale"] = (stored.num_groups(hidden), num_tokens), stored.scale_dtype
        self.quantizing = QuantizeShape(stored, num_tokens, hidden, x.stride(0), self._sizes.static, x.dtype)
        self._launches.append((quantize_launch(self.quantizing, self.device), QUANTIZED))
        values, scale = (torch.empty(shape, dtype=kind, device="meta") for shape, kind in self._pieces.values())
        return values, scale.t()

    def _place(self, frame: Frame, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        """Add the launches that merge repeats and find where rows go."""
        (num_tokens, num_topk), experts = topk_ids.shape, frame.num_local_experts
        for name, kind in (("local_ids", torch.int32), ("topk_weights", torch.float32), ("token_to_row", torch.int32)):
            self._pieces[name] = (num_tokens, num_topk), kind
        self._pieces["before"] = (triton.cdiv(num_tokens, block_tokens(num_topk)), experts), torch.int32
        counts = "expert_num_tokens", "expert_row_start"
        self._pieces |= dict.fromkeys(counts, ((experts,), torch.int32))
        own, strides = (self._sizes.first, self._sizes.first + experts), (topk_ids.stride(0), topk_weights.stride(0))
        like: dict[str, Any] = {"ids_dtype": topk_ids.dtype, "device": self.device}
        self.placing, launches = place_launches(PLACED, topk_ids.shape, own, strides, frame, **like)
        self._launches += launches

    def _copy(self, frame: Frame, rows: TokenRows, source: str) -> CopyShape:
        """Add the launch that fills the batch from tensors of these names; returns its shape."""
        lead = 0 if frame.layout is Layout.BATCHED else 1  # leading dimensions of the frame that the batch lacks
        self._pieces["x"] = frame.x.shape[lead:], frame.x.dtype
        if frame.scale is not None:
            self._pieces["scale"] = frame.scale.mT.shape[lead:], frame.scale.dtype
        shape = CopyShape.of(rows, frame)
        launch = copy_launch(shape, None if rows.scale is None else rows.scale.dtype, self.device)
        places = Places("local_ids", "before", "expert_row_start")
        copied = f"{source}:words", f"{source}_scale:bytes"
        self._launches.append((launch, (places, *copied, "token_to_row", None, "x:words", "scale:bytes")))
        return shape

    def _list(self, frame: Frame, rows: TokenRows) -> None:
        """Add the launch that finds the rows of each expert."""
        assert frame.row_index is not None
        self._pieces["row_index"] = frame.row_index.shape, torch.int32
        shape = CopyShape.of(dataclasses.replace(rows, scale=None), frame, copied=False)
        places = Places("local_ids", "before", "expert_row_start")
        names = places, None, None, "token_to_row", "row_index", None, None
        self._launches.append((copy_launch(shape, None, self.device), names))

    def inputs(
        self,
        x: torch.Tensor | Quantized,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        static_scale: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """The tensors that `sequence` is given, in its order. Local, no host sync."""
        tensors = [x] if isinstance(x, torch.Tensor) else [x.values, x.scale]
        tensors += [topk_ids, topk_weights]
        if self._number:
            number = largest_or_scale(tensors[0], self._sizes.scheme.payload, static_scale)
            assert number is not None
            tensors.append(number)
        return tensors

    def pack(self, *inputs: Any) -> ExpertBatch | None:
        """Pack `inputs` of this kind; None if one is not aligned to 16 bytes. Local, no host sync."""
        tensors = self.inputs(*inputs)
        addresses = [*map(torch.Tensor.data_ptr, tensors)]
        memory = self.sequence.repeat(addresses)
        if memory is None:
            if any(address % 16 for address in addresses):
                return None
            memory = self.sequence.run(dict(zip(self.sequence.given, tensors, strict=True)))
        there = {}
        for field, name in self._where_they_are.items():
            tensor = tensors[0] if name == "tokens" else self.sequence.workspace.view(memory, name)
            there[field] = tensor.t() if field == "scale" else tensor
        return self.template.batch(memory, **there)

    def view(self, batch: ExpertBatch, name: str) -> torch.Tensor:
        """`token_to_row` or `topk_weights` of a batch, [N, K]. Local."""
        assert batch.memory is not None
        return self.sequence.workspace.view(batch.memory, name)

    def sum_launch(self, dtype: torch.dtype, out: torch.Tensor | None) -> Kernel | None:
        """The launch of earlier `weighted_sum`s of contiguous y in this dtype, into outputs like this one. Local."""
        return self._sums.get(_sum_key(dtype, True, out))

    def weighted_sum(self, y: torch.Tensor, batch: ExpertBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """`layout.weighted_sum` of the experts' output for a batch, of each `tokens_in_sum` tokens. No host sync."""
        key = _sum_key(y.dtype, y.is_contiguous(), out)
        target = self.new_result() if out is None else out
        launch, memory = self._sums.get(key), batch.memory
        assert memory is not None
        offset_of, y_address, address = self.sequence.workspace.offset_of, y.data_ptr(), target.data_ptr()
        if launch is not None and launch.run is not None and not (y_address | address) & 15:
            base = memory.data_ptr()
            launch.run((y_address, base + offset_of("token_to_row"), base + offset_of("topk_weights"), address))
            return target
        rows, weights = (self.view(batch, name).view(self._summed) for name in ("token_to_row", "topk_weights"))
        fits = target.shape == (self._summed[0], self._hidden) and target.device == self.device
        if not fits or not y.is_contiguous() or target.stride(1) != 1:
            return weighted_sum(y, rows, weights, out=target)
        if launch is None:
            launch = prepare_weighted_sum(self._summed, self._hidden, self.device, out_stride=target.stride(0))
            self._sums[key] = launch
        launch((y.view(-1, self._hidden), rows, weights, None, target))
        return target


def _sum_key(dtype: torch.dtype, contiguous: bool, out: torch.Tensor | None) -> tuple[object, ...]:
    """What the launch of a sum depends on."""
    given = () if out is None else (out.shape, out.stride(), out.dtype, out.device)
    return dtype, contiguous, *given


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, of the same shape, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
