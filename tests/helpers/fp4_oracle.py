"""FP4 experts in float64, from the formats' definitions and the words of FlashInfer's documentation alone.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts; N and C rows and columns of a weight.
"""

import dataclasses
import math

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
GROUP = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}


def fp4(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 as real numbers: three bits of magnitude under a sign."""
    return torch.where(codes >= 8, -1.0, 1.0) * E2M1[(codes & 7).long()]


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """[..., C / 2] bytes to [..., C] codes: the low four bits first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def scale_of(stored: torch.Tensor, kind: str) -> torch.Tensor:
    """Bytes of scales as real numbers: e4m3 for NVFP4, else powers of two."""
    if kind == "nvfp4":
        return stored.view(torch.float8_e4m3fn).double()
    return 2.0 ** (stored.double() - 127)


def real(values: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """What values and scales, as bytes, stand for."""
    elements = values.view(torch.float8_e4m3fn).double() if kind == "mxfp8" else fp4(unpack(values))
    return elements * scale_of(scale, kind).repeat_interleave(GROUP[kind], dim=-1)


def random_stored(
    shape: tuple[int, ...], kind: str, size: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random values and scales, as bytes, of a tensor of this shape whose elements are of about this size."""
    *lead, columns = shape
    exponent = round(math.log2(size / 3))
    if kind == "mxfp8":
        values = torch.randn(shape, generator=generator).mul(3).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        values = torch.randint(0, 256, (*lead, columns // 2), generator=generator, dtype=torch.uint8)
    sizes = (*lead, columns // GROUP[kind])
    if kind == "nvfp4":
        scale = (2.0**exponent * (1 + torch.rand(sizes, generator=generator))).to(torch.float8_e4m3fn)
        return values, scale.view(torch.uint8)
    return values, torch.randint(126 + exponent, 129 + exponent, sizes, generator=generator).to(torch.uint8)


def round_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """Rows [n, C] rounded to MXFP8."""
    grouped = x.unflatten(-1, (-1, 32))
    scale = 2.0 ** (grouped.abs().amax(-1, keepdim=True).clamp(min=2.0**-100).log2().floor() - 8)
    return ((grouped / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


def round_nvfp4(x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Rows [n, C] rounded to NVFP4, with global scales [n, 1]."""
    grouped = x.unflatten(-1, (-1, 16)) / whole[..., None]
    scale = (grouped.abs().amax(-1, keepdim=True) / 6).clamp(max=448).float().to(torch.float8_e4m3fn).double()
    magnitude = torch.where(scale > 0, grouped.abs() / scale, 0.0)
    odd = torch.arange(8) % 2 * 1e-12  # ties go to even codes
    nearest = ((magnitude[..., None] - E2M1).abs() + odd).argmin(-1)
    return (E2M1[nearest] * grouped.sign() * scale).flatten(-2) * whole


def round_rows(x: torch.Tensor, how: str) -> torch.Tensor:
    """The intermediate as the second GEMM sees it: "bf16", "mxfp8", or "nvfp4" with a global scale for each row."""
    if how == "nvfp4":
        return round_nvfp4(x, x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 2688)
    return round_mxfp8(x) if how == "mxfp8" else x.bfloat16().double()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """FP4 experts: bytes as they are stored, w1 [up; gate] if gated, and the numbers of each expert, if there are."""

    kind: str
    gated: bool
    w1: torch.Tensor  # [E, N, H / 2]
    w1_scale: torch.Tensor
    w2: torch.Tensor  # [E, H, I / 2]
    w2_scale: torch.Tensor
    b1: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    alpha: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    limit: torch.Tensor | None = None
    up: torch.Tensor | None = None  # output1_scale_scalar
    gate: torch.Tensor | None = None  # output1_scale_gate_scalar
    second: torch.Tensor | None = None  # output2_scale_scalar

    def number(self, name: str, expert: int, default: float) -> float:
        tensor = getattr(self, name)
        return default if tensor is None else float(tensor[expert])

    def expert(self, x: torch.Tensor, expert: int, function: str, how: str) -> torch.Tensor:
        """Rows [n, H] of one expert."""
        sums = x @ real(self.w1[expert], self.w1_scale[expert], self.kind).T
        if self.b1 is not None:
            sums = sums + self.b1[expert].double()
        first, gate = self.number("up", expert, 1.0), self.number("gate", expert, 1.0)
        if function in ("swiglu_step", "situ"):
            inner = first * self.of_scaled_halves(*sums.chunk(2, dim=1), gate, expert, function)
        elif self.gated:
            linear, other = sums.chunk(2, dim=1)
            limit, alpha = self.number("limit", expert, math.inf), self.number("alpha", expert, 1.0)
            linear, other = linear.clamp(-limit, limit), gate * other.clamp(max=limit)
            linear = first * (linear + self.number("beta", expert, 0.0))
            if function == "geglu":
                inner = linear * other * 0.5 * (1 + torch.erf(other / math.sqrt(2)))
            elif function == "geglu_tanh":
                inner = linear * other * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (other + 0.044715 * other**3)))
            else:
                inner = linear * other / (1 + torch.exp(-alpha * other))
        else:
            inner = first * (gate * sums if function == "identity" else (gate * sums).clamp(min=0) ** 2)
        out = round_rows(inner, how) @ real(self.w2[expert], self.w2_scale[expert], self.kind).T
        if self.b2 is not None:
            out = out + self.b2[expert].double()
        return out * self.number("second", expert, 1.0)

    def of_scaled_halves(
        self, linear: torch.Tensor, other: torch.Tensor, gate: float, expert: int, function: str
    ) -> torch.Tensor:
        """Activations that are nonlinear in both halves, after the gate's scale of both."""
        if function == "swiglu_step":
            limit = self.number("limit", expert, 7.0)
            silu = gate * other / (1 + torch.exp(-gate * other))
            return silu.clamp(max=limit) * (gate * linear).clamp(-limit, limit)
        limit = self.number("limit", expert, math.inf)
        linear, other = gate * linear.clamp(-limit, limit), gate * other.clamp(max=limit)
        alpha, beta = self.number("alpha", expert, 1.0), self.number("beta", expert, 1.0)
        return beta * torch.tanh(linear / beta) * alpha * torch.tanh(other / alpha) / (1 + torch.exp(-other))

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, function: str, how: str, local: range
    ) -> torch.Tensor:
        """The weighted sum [T, H] over each token's experts that are in `local`."""
        out = torch.zeros(x.shape[0], self.w2.shape[1], dtype=torch.float64)
        for expert in local:
            chosen = (ids == expert).double() * weights.double()
            token = chosen.any(1).nonzero()[:, 0]
            if len(token):
                out[token] += chosen[token].sum(1)[:, None] * self.expert(x[token], expert, function, how)
        return out


def random_layer(kind: str, gated: bool, experts: int, hidden: int, inner: int, generator: torch.Generator) -> Layer:
    """Experts without biases and numbers of their own."""
    w1, w1_scale = random_stored((experts, (2 if gated else 1) * inner, hidden), kind, hidden**-0.5, generator)
    w2, w2_scale = random_stored((experts, hidden, inner), kind, inner**-0.5, generator)
    return Layer(kind=kind, gated=gated, w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale)


def choose(
    logits: torch.Tensor, method: int, topk: int, bias: torch.Tensor | None = None, **more: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights [T, K] by FlashInfer's routing methods, in float64."""
    scores, factor = logits.double(), more.get("factor", 1.0)
    sigmoid, softmax = 1 / (1 + torch.exp(-scores)), torch.softmax(scores, 1)
    if method == 1:
        values, ids = scores.topk(topk)
        return ids, torch.softmax(values, 1)
    if method in (2, 7):
        choice = sigmoid if bias is None else sigmoid + bias.double()
        groups = int(more.get("n_group", 1))
        if groups > 1:
            grouped = choice.unflatten(1, (groups, -1))
            kept = grouped.topk(2, dim=2).values.sum(2).topk(int(more["topk_group"])).indices
            mask = torch.zeros(len(logits), groups).scatter_(1, kept, 1.0)
            choice = torch.where(mask.bool()[:, :, None], grouped, -torch.inf).flatten(1)
        ids = choice.topk(topk).indices
        weights = sigmoid.gather(1, ids)
        return ids, (weights / weights.sum(1, keepdim=True) if more.get("norm", True) else weights) * factor
    source = {0: softmax, 3: scores, 4: softmax, 5: scores, 6: sigmoid, 8: sigmoid, 9: scores}[method]
    values, ids = source.topk(topk)
    if method in (3, 9):
        values = 1 / (1 + torch.exp(-values))
    if method in (4, 6) and more.get("norm", True):
        values = values / values.sum(1, keepdim=True)
    return ids, values
