"""Random experts that any rank can regenerate by id, and their expected output in float32.

Letters: T tokens, n of them, K top-k, E logical experts, L local experts, H hidden, I intermediate; W = 2I if the
activation is gated, else I.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ep_moe.config import ActivationConfig, MoEConfig
from ep_moe.experts import apply_activation
from ep_moe.quant import QuantScheme, dequantize, dequantize_weight, quantize, quantize_weight, round_trip
from ep_moe.weights import ExpertWeights

TOKEN_AMAX = 8.0  # tokens are normally distributed: none exceeds this
INNER_AMAX = 32.0  # of the activation's output; under a static scale larger values saturate, in the oracle too
SEED_STRIDE = 1_000_003  # prime and larger than any number of experts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Expert:
    """One expert, unquantized: w13 [W, H], w2 [H, I], biases [W] and [H] or None."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None


class RandomExperts:
    """The experts of one layer. Expert e depends on `seed` and e alone; no two experts are the same.

    Args:
        config: the layer. dtype: of the weights before they are quantized. bias: True if both GEMMs add one.
        device: of the generator; another device type gives other values.
    """

    def __init__(self, config: MoEConfig, dtype: torch.dtype, device: torch.device, *, bias: bool, seed: int) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._bias, self._seed = bias, seed

    def expert(self, index: int) -> Expert:
        """Make logical expert `index`. Local."""
        generator = torch.Generator(self._device).manual_seed(self._seed * SEED_STRIDE + index)
        hidden, intermediate = self._config.hidden, self._config.intermediate
        width = intermediate * (2 if self._config.activation.kind.gated else 1)

        def normal(*shape: int, std: float) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self._device).mul_(std).to(self._dtype)

        return Expert(
            w13=normal(width, hidden, std=hidden**-0.5),
            w2=normal(hidden, intermediate, std=intermediate**-0.5),
            w13_bias=normal(width, std=0.5) if self._bias else None,
            w2_bias=normal(hidden, std=0.5) if self._bias else None,
        )

    def local(self, indices: Sequence[int], scheme: QuantScheme) -> ExpertWeights:
        """Make the experts `indices`, quantized one by one, with static scales if the scheme scales per tensor.

        Returns: weights with L = len(indices), in that order. Errors: ValueError for no experts. Local.
        """
        if not indices:
            raise ValueError("a rank without experts has nothing to measure: use fewer ranks or more experts")
        tensors: dict[str, torch.Tensor] = {}
        for place, index in enumerate(indices):
            for name, tensor in _stored(self.expert(index), scheme).items():
                if name not in tensors:
                    tensors[name] = tensor.new_empty(len(indices), *tensor.shape)
                tensors[name][place].copy_(tensor)
        if scheme.activation == "tensor":
            options: dict[str, Any] = {"dtype": torch.float32, "device": self._device}
            tensors["w13_input_scale"] = _static_scale(TOKEN_AMAX, scheme, (1,), **options)
            tensors["w2_input_scale"] = _static_scale(INNER_AMAX, scheme, (len(indices),), **options)
        return ExpertWeights(scheme=scheme, **tensors)


def _stored(expert: Expert, scheme: QuantScheme) -> dict[str, torch.Tensor]:
    """One expert's tensors, by their names in ExpertWeights."""
    stored = {"w13": expert.w13, "w2": expert.w2}
    if scheme.quantized:
        for name in ("w13", "w2"):
            stored[name], stored[f"{name}_scale"], global_scale = quantize_weight(stored[name], scheme)
            if global_scale is not None:
                stored[f"{name}_global_scale"] = global_scale
    for name in ("w13_bias", "w2_bias"):
        tensor = getattr(expert, name)
        if tensor is not None:
            stored[name] = tensor
    return stored


def _static_scale(amax: float, scheme: QuantScheme, shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    assert scheme.dtype is not None
    return torch.full(shape, amax / torch.finfo(scheme.dtype).max, **options)


def _rounded(x: torch.Tensor, scheme: QuantScheme, dtype: torch.dtype, amax: float, *, travels: bool) -> torch.Tensor:
    """Rows [n, .] in float32 as their reader sees them: quantized and back, or rounded to the model's dtype."""
    if not scheme.quantized:
        return x.to(dtype).float()
    static = None
    if scheme.activation == "tensor":
        static = _static_scale(amax, scheme, (1,), dtype=torch.float32, device=x.device)
    if travels:
        return dequantize(quantize(x, scheme, static_scale=static))
    return round_trip(x, scheme, static_scale=static)


def expected_output(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    make_expert: Callable[[int], Expert],
    *,
    activation: ActivationConfig,
    scheme: QuantScheme,
) -> torch.Tensor:
    """The experts' weighted sum of some tokens, in float32 throughout except for the scheme's rounding.

    Tokens, weights and the activation's output are quantized by the scheme; without quantization the activation's
    output is rounded to x's dtype. Uses no router, layout or exchange.

    Args:
        x: [n, H] in the model's dtype. topk_ids: [n, K] logical, -1 none. topk_weights: [n, K] float32.
        make_expert: makes the unquantized expert of a logical id, in x's dtype.
    Returns: [n, H] float32. Local, host sync.
    """
    tokens = _rounded(x, scheme, x.dtype, TOKEN_AMAX, travels=True)
    total = torch.zeros_like(tokens)
    for index in torch.unique(topk_ids[topk_ids >= 0]).tolist():
        row, column = torch.nonzero(topk_ids == index, as_tuple=True)
        stored = _stored(make_expert(index), scheme)
        w13, w2 = (
            dequantize_weight(stored[name], stored.get(f"{name}_scale"), scheme, stored.get(f"{name}_global_scale"))
            for name in ("w13", "w2")
        )
        first = tokens[row] @ w13.t()
        if "w13_bias" in stored:
            first += stored["w13_bias"].float()
        inner = _rounded(apply_activation(first, activation), scheme, x.dtype, INNER_AMAX, travels=False)
        second = inner @ w2.t()
        if "w2_bias" in stored:
            second += stored["w2_bias"].float()
        total.index_add_(0, row, second * topk_weights[row, column].unsqueeze(1))
    return total
