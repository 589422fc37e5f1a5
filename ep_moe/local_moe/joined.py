"""A call of `local_moe` as one sequence of launches over one allocation: packing, the experts, the weighted sum.

Nothing is checked and no object is made between the launches, which takes the host longer than the launches do.
"""

from collections.abc import Sequence

import torch

from ep_moe.experts import Experts
from ep_moe.experts.kernels import KernelExperts, RepeatedCall
from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernel_launch.sequence import LaunchSequence, joined
from ep_moe.local_moe.routed import RoutedPacking
from ep_moe.local_moe.start import start_of
from ep_moe.weights import ExpertWeights

_FOUND = ("tokens", "ids", "weights")  # names of packing's inputs that launches before it may make


class JoinedCall:
    """Calls with the same weights whose other tensors differ in address and values alone."""

    def __init__(self, sequence: LaunchSequence, call: RepeatedCall, packing: RoutedPacking) -> None:
        self._sequence, self._weights, self._new_result = sequence, call.weights, packing.new_result
        self._fixed: list[int] | None = None
        self.inputs = packing.inputs  # the tensors of a call without routing

    def __call__(self, tensors: Sequence[torch.Tensor], out: torch.Tensor | None) -> torch.Tensor | None:
        """Launch; the result, or None if a tensor is not aligned to 16 bytes, with nothing launched.

        Args:
            tensors: `inputs`; if routing is part of the sequence, its inputs stand in place of ids and weights, behind
                the tokens. out: as that of the first call, None if there was none.
        Local, on the current stream, no host sync.
        """
        target = self._new_result() if out is None else out
        addresses = [*map(torch.Tensor.data_ptr, tensors), target.data_ptr()]
        if self._fixed is None:
            addresses += map(torch.Tensor.data_ptr, self._weights)
        return None if self._sequence.repeat(addresses, self._fixed) is None else target

    def fix_weights(self) -> bool:
        """From now on, read the weights where they lie now; False if one is not aligned to 16 bytes. Local."""
        addresses = [weight.data_ptr() for weight in self._weights]
        if any(address % 16 for address in addresses):
            return False
        self._fixed = addresses
        return True


def repeated_experts(experts: Experts, signature: object, weights: ExpertWeights) -> RepeatedCall | None:
    """The experts' part of earlier calls with batches of this signature; None if it is no repeated launches. Local."""
    if not isinstance(experts, KernelExperts):
        return None
    call = experts.repeated(signature, weights)
    return call if call is not None and call.in_place and call.sequence.loaded is not None else None


def join(
    packing: RoutedPacking,
    call: RepeatedCall,
    summed: Kernel,
    tensors: Sequence[torch.Tensor],
    routing: LaunchSequence | None = None,
) -> LaunchSequence | None:
    """The launches of packing, experts and sum as one sequence; None if a kernel is not loaded yet.

    What comes before the copy of rows, of few tokens also the copy, is one launch there, of a kernel of its own, which
    is loaded here.

    Args:
        summed: the sum's launch. tensors: `inputs` of a call, with which that kernel is tried. routing: launches
            before all of these, whose workspace has "ids", "weights" and perhaps "tokens".
    Local. No kernel is loaded while a CUDA graph is captured.
    """
    packed, computed = packing.sequence, call.sequence
    parts: list[tuple[LaunchSequence, dict[str, str]]] = []
    of_routing = dict[str, str]()
    if routing is not None:
        parts.append((routing, {}))
        of_routing = {name: f"0:{name}" for name in _FOUND if name in routing.pieces}
    start = None
    if packing.placing is not None:
        start, names = start_of(packing, call.row_tiles, computed.pieces)
        placed, tiles, tokens = names
        prefix, last = f"{len(parts) + 1}:", f"{len(parts) + 2}:"
        whole_names = {name: f"{prefix}{name}" for name in (*placed, *tokens) if name is not None} | of_routing
        whole_names |= {name: name.replace("tiles:", last) for name in tiles if name is not None}
        parts.append((LaunchSequence([(start, names)], (), {}, packing.device), whole_names))
        shapes = packing.placing, packing.quantizing, packing.copying
        packed, computed = packed.behind(sum(shape is not None for shape in shapes)), computed.behind(1)
    prefix, given = str(len(parts)), packed.given
    parts.append((packed, of_routing))
    of_batch = {name: of_routing.get(piece, f"{prefix}:{piece}") for name, piece in packing.names.items()}
    parts.append((computed, {**of_batch, "y": "y"}))
    inputs = [f"{prefix}:{name}" for name in given if name not in of_routing]
    if routing is not None:
        first = ("tokens" not in of_routing) + ("tokens_scale" in given)
        inputs[first:first] = [f"0:{name}" for name in routing.given]
    held = [f"{len(parts) - 1}:{name}" for name in call.held]
    rows = f"{prefix}:token_to_row", f"{prefix}:topk_weights"
    whole = joined(
        parts,
        [(summed, ("y", *rows, None, "out"))],
        (*inputs, "out", *held),
        {"y": (call.y_shape, call.dtype)},
        packing.device,
    )
    if start is not None and start.run is None:
        if packing.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        named = {f"{prefix}:{name}": tensor for name, tensor in zip(given, tensors, strict=True)}
        _, launches = whole.bound(named)  # ids that routing has not written yet are none, or any
        launches[0 if routing is None else len(routing.launches)]()
    return whole if whole.load() else None
