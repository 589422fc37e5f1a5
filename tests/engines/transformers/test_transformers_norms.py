"""RMS norms of sharded models run as torch's operation, where the class means the same."""

from typing import Any

import pytest
import torch
from helpers.decoding import sharded_model
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from ep_moe.engines.transformers.norms import NormForward, replace_norms


def in_float64(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The definition, in float64."""
    wide, weight = x.double(), norm.weight.detach().double()
    return wide / (wide.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [Qwen3MoeRMSNorm, DeepseekV3RMSNorm, GptOssRMSNorm], ids=lambda kind: kind.__name__)
def test_a_norm_means_the_same(kind: type[nn.Module], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    norm = kind(48, eps=1e-3).to(dtype)
    norm.weight.data.copy_(torch.randn(48, generator=generator))
    x = (torch.randn(3, 5, 48, generator=generator) * torch.tensor([1e-2, 1.0, 1e2])[:, None, None]).to(dtype)
    assert replace_norms(nn.Sequential(norm)) == 1
    found = norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), in_float64(norm, x), rtol=2 * torch.finfo(dtype).eps, atol=0)
    norm.weight = nn.Parameter(-norm.weight.detach())  # assigned anew, as a loader does
    assert torch.equal(norm(x), -found)


class ScaledRMSNorm(nn.Module):
    """Not what its name says: a factor of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()


def test_others_keep_their_forward() -> None:
    gemma_like, scaled, patched = Qwen3NextRMSNorm(8), ScaledRMSNorm(), Qwen3MoeRMSNorm(8)
    own: Any = lambda x: x  # noqa: E731
    patched.forward = own
    model = nn.Sequential(gemma_like, scaled, patched, nn.RMSNorm(8), nn.LayerNorm(8))
    x = torch.randn(2, 8)
    before = model(x)
    assert replace_norms(model) == 0
    assert torch.equal(model(x), before)
    assert patched.forward is own


def test_a_weight_of_another_dtype_is_left_to_the_class() -> None:
    norm = Qwen3MoeRMSNorm(8)
    x = torch.randn(2, 8).bfloat16()
    expected = norm(x)
    assert replace_norms(nn.Sequential(norm)) == 1
    found = norm(x)
    assert found.dtype == expected.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_sharded_models_use_them(name: str) -> None:
    model = sharded_model(name)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert norms
    assert all(isinstance(norm.forward, NormForward) for norm in norms)
