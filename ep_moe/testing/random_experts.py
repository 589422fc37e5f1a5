"""Random experts that any rank can regenerate by id, and their expected output in float32.

Letters: T tokens, n of them, K top-k, E logical experts, L local experts, H hidden, I intermediate; W = 2I if the
activation is gated, else I.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ep_moe.config import MoEConfig
from ep_moe.experts import apply_activation
from ep_moe.quant import QuantScheme, StoredMatrix, dequantize, dequantize_weight, quantize, quantize_weight, round_trip
from ep_moe.weights import ExpertWeights

SEED_STRIDE = 1_000_003  # prime and larger than any number of experts
TOKEN_AMAX = 8.0  # tokens are normally distributed: none exceeds this
INNER_AMAX = 32.0  # of the activation's output; with a static scale, larger values saturate, in the oracle too


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
        self._width = config.w13_rows

    def expert(self, index: int) -> Expert:
        """Make logical expert `index`. Local."""
        generator = torch.Generator(self._device).manual_seed(self._seed * SEED_STRIDE + index)
        hidden, intermediate, width = self._config.hidden, self._config.intermediate, self._width

        def normal(*shape: int, std: float) -> torch.Tensor:
            return (
                torch.randn(shape, generator=generator, dtype=torch.float32, device=self._device)
                .mul_(std)
                .to(self._dtype)
            )

        return Expert(
            w13=normal(width, hidden, std=hidden**-0.5),
            w2=normal(hidden, intermediate, std=intermediate**-0.5),
            w13_bias=normal(width, std=0.5) if self._bias else None,
            w2_bias=normal(hidden, std=0.5) if self._bias else None,
        )

    def expected_output(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, scheme: QuantScheme
    ) -> torch.Tensor:
        """The experts' weighted sum of some tokens, in float32 throughout except for the scheme's rounding.

        Tokens, weights and the activation's output are quantized by the scheme; without quantization the activation's
        output is rounded to x's dtype. Uses no router, layout or exchange.

        Args:
            x: [n, H] in the dtype of the experts. topk_ids: [n, K] logical, -1 none. topk_weights: [n, K] float32.
        Returns: [n, H] float32. Local, host sync.
        """
        tokens = _rounded(x, scheme, x.dtype, TOKEN_AMAX, travels=True)
        total = torch.zeros_like(tokens)
        for index in torch.unique(topk_ids[topk_ids >= 0]).tolist():
            row, column = torch.nonzero(topk_ids == index, as_tuple=True)
            expert = self.expert(index)
            w13, w2 = (dequantize_weight(_stored(weight, scheme), scheme) for weight in (expert.w13, expert.w2))
            first = tokens[row] @ w13.t()
            if expert.w13_bias is not None:
                first += expert.w13_bias.float()
            activated = apply_activation(first, self._config.activation)
            second = _rounded(activated, scheme, x.dtype, INNER_AMAX, travels=False) @ w2.t()
            if expert.w2_bias is not None:
                second += expert.w2_bias.float()
            total.index_add_(0, row, second * topk_weights[row, column].unsqueeze(1))
        return total

    def local(self, indices: Sequence[int], scheme: QuantScheme) -> ExpertWeights:
        """Make the experts `indices`, quantized one by one, with static scales if the scheme scales per tensor.

        Returns: weights with L = len(indices), in that order. Errors: ValueError for no experts. Local.
        """
        if not indices:
            raise ValueError("a rank without experts has nothing to measure: use fewer ranks or more experts")
        options: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
        shapes = {"w13": (self._width, self._config.hidden), "w2": (self._config.hidden, self._config.intermediate)}
        matrices = {
            name: StoredMatrix.empty((len(indices), *shape), scheme.weight, **options) for name, shape in shapes.items()
        }
        tensors: dict[str, torch.Tensor] = {}
        if self._bias:
            tensors = {f"{name}_bias": torch.empty(len(indices), rows, **options) for name, (rows, _) in shapes.items()}
        for place, index in enumerate(indices):
            expert = self.expert(index)
            for name, matrix in matrices.items():
                matrix[place].copy_(_stored(getattr(expert, name), scheme))
            for name, bias in tensors.items():
                bias[place].copy_(getattr(expert, name))
        if scheme.activation.granularity == "tensor":
            options["dtype"] = torch.float32
            tensors["w13_input_scale"] = _static_scale(TOKEN_AMAX, scheme, (1,), **options)
            tensors["w2_input_scale"] = _static_scale(INNER_AMAX, scheme, (len(indices),), **options)
        return ExpertWeights(scheme=scheme, w13=matrices["w13"], w2=matrices["w2"], **tensors)  # type: ignore[arg-type]


def _stored(weight: torch.Tensor, scheme: QuantScheme) -> StoredMatrix:
    return quantize_weight(weight, scheme) if scheme.weight.quantized else StoredMatrix(weight)


def _static_scale(amax: float, scheme: QuantScheme, shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    assert scheme.activation.dtype is not None
    return torch.full(shape, amax / torch.finfo(scheme.activation.dtype).max, **options)


def _rounded(x: torch.Tensor, scheme: QuantScheme, dtype: torch.dtype, amax: float, *, travels: bool) -> torch.Tensor:
    """Rows [n, .] in float32 as the next GEMM gets them: quantized and dequantized, or rounded to the model's dtype.

    Args:
        travels: True for tokens that are sent, in the payload's format; False for the intermediate between the GEMMs.
    """
    stored = scheme.payload if travels else scheme.activation
    if not stored.quantized:
        return x.to(dtype).float()
    static = None
    if stored.granularity == "tensor":
        static = _static_scale(amax, scheme, (1,), dtype=torch.float32, device=x.device)
    if travels:
        return dequantize(quantize(x, scheme, static_scale=static))
    return round_trip(x, scheme, static_scale=static)
