"""The device of these tests' kernels, and random inputs."""

import functools
import os

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu")
ON_CPU = DEVICE.type == "cpu"
CAN_RUN = INTERPRETING or DEVICE.type == "cuda"


def generator(name: str) -> torch.Generator:
    """A generator for each case, seeded by its name."""
    return torch.Generator().manual_seed(sum(ord(letter) * (place + 1) for place, letter in enumerate(name)))


def random_payload(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    """Random values in any payload dtype, without NaN patterns; on the CPU."""
    if dtype.itemsize == 1:
        return torch.randint(0, 127, shape, generator=random, dtype=torch.uint8).view(dtype)
    return torch.randn(shape, generator=random).to(dtype)


def strided(tensor: torch.Tensor, *, gap: int) -> torch.Tensor:
    """The same rows with `gap` elements after each, as in a wire buffer; one-byte floats too."""
    bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    wide = bits.new_zeros(tensor.shape[0], tensor.shape[1] + gap)
    wide[:, : tensor.shape[1]] = bits
    return wide.view(tensor.dtype)[:, : tensor.shape[1]]


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries' calls compute by kernels from now on, also in the interpreter, where "auto" means torch."""
    from ep_moe.experts import create_experts  # other tests do without these imports
    from ep_moe.functional import common
    from ep_moe.functional.plans import plan_cache
    from ep_moe.functional.sglang import gemm
    from ep_moe.local_moe.row_gemm import gemm_rows

    monkeypatch.setattr(common, "create_experts", lambda name, *given, **more: create_experts("triton", *given, **more))
    monkeypatch.setattr(gemm, "gemm_rows", functools.partial(gemm_rows, kernels=True))
    plan_cache.cache_clear()
