"""The patches of Triton's interpreter change no bit of a result, and are left out on a Triton that they do not know."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch

pytest.importorskip("triton")

import quick_interpreter
import triton
import triton.language as tl
from quick_interpreter import KNOWN_VERSIONS, hurry
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

ROWS, COLUMNS, WIDTH = 5, 48, 64


@triton.jit
def _squares(x, scale):
    return x * x * scale


@triton.jit
def _mixed_kernel(x_ptr, ids_ptr, sums_ptr, half_ptr, rows_ptr, words_ptr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Blocks of several shapes and dtypes, a device function, a loop, masks, pointer casts, an atomic, overflow."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < COLUMNS
    x = tl.load(x_ptr + row * COLUMNS + column, mask=inside, other=0.0)
    total = tl.zeros((WIDTH,), tl.float32)
    for step in range(3):
        total += _squares(x, 1.0 / (step + 1))
    tl.store(sums_ptr + row * WIDTH + column, tl.cumsum(total, 0))
    block = tl.reshape(x, (4, WIDTH // 4))
    means = tl.sum(block, 1) / block.shape[1] + tl.max(block, 0)[:, None].to(half_ptr.dtype.element_ty)
    place = tl.arange(0, block.shape[1])[:, None] * block.shape[0] + tl.arange(0, block.shape[0])[None, :]
    halves = 2 - means.to(tl.bfloat16) / 3 + x.to(tl.float8e4nv).to(tl.bfloat16).reshape(means.shape) * -0.0
    tl.store(half_ptr + row * WIDTH + place, halves)
    ids = tl.load(ids_ptr + row)
    word = ((ids * 1103515245 + column) / block.numel).to(ids.dtype).to(tl.int64)
    tl.store(words_ptr + row * WIDTH + column, (word << 32) | x.to(tl.int32, bitcast=True).to(word.dtype))
    tl.atomic_add(rows_ptr.to(tl.pointer_type(tl.int32)) + ids % 2, tl.sum(inside.to(tl.int32), 0))


def _results() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=random)
    ids = torch.randint(0, 2**31 - 1, (ROWS,), generator=random, dtype=torch.int32)
    sums, half = torch.full((ROWS, WIDTH), torch.nan), torch.full((ROWS, WIDTH), torch.nan, dtype=torch.bfloat16)
    rows, words = torch.zeros(2, dtype=torch.int32), torch.full((ROWS, WIDTH), -1, dtype=torch.int64)
    _mixed_kernel[(ROWS,)](x, ids, sums, half, rows, words, COLUMNS, WIDTH)
    return [sums.view(torch.int32), half.view(torch.int16), rows, words]


def _conversions() -> list[Any]:
    """All bfloat16 and floats of a byte as float32, and any float32 as bfloat16, with and without subnormals."""
    halves, words = numpy.arange(2**16, dtype=numpy.uint16), numpy.arange(2**16, dtype=numpy.uint32) * 65539
    some = [(halves, tl.bfloat16, tl.float32), (halves[halves & 0x7F80 > 0], tl.bfloat16, tl.float32)]
    some += [(words, tl.float32, tl.bfloat16), (words[words & 0x7F800000 > 0], tl.float32, tl.bfloat16)]
    some += [(halves[:256].astype(numpy.uint8), kind, tl.float32) for kind in (tl.float8e4nv, tl.float8e5)]
    return [interpreter._convert_float(*each, None).view(numpy.uint8) for each in some]


def _internals() -> list[Any]:
    """All that the patches replace."""
    return [
        *(interpreter._patch_lang, interpreter._patch_lang_core, interpreter._get_np_dtype),
        *(interpreter._patch_attr, interpreter._convert_float, interpreter.TensorHandle.__init__),
        *(TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value),
        *(core._unwrap_if_constexpr, core.block_type.__init__, core.tensor.__init__),
        *(core.block_type.to_ir, core.pointer_type.to_ir, interpreter.interpreter_builder.options),
    ]


def _check_results() -> None:
    before, plain, converted = _internals(), _results(), _conversions()
    hurry()
    assert all(now != was for now, was in zip(_internals(), before, strict=True)), "the interpreter is not patched"
    again = _results()
    assert plain[2].sum() == ROWS * COLUMNS
    assert all(numpy.array_equal(a, b) for a, b in zip(_conversions(), converted, strict=True)), "conversions differ"
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True)), "the patched interpreter differs"


def _check_unknown() -> None:
    before = _internals()
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(triton, "__version__", "3.99.0"):
        warnings.simplefilter("always")
        hurry()
        hurry()
    assert _internals() == before, "an unknown Triton was patched"
    quick_interpreter._done.clear()
    assert [str(warning.message) for warning in caught] == [
        "Triton 3.99.0: its interpreter stays unpatched and slow, the patches are for 3.6 to 3.9"
    ]


IS_KNOWN = triton.__version__.startswith(tuple(f"{version}." for version in KNOWN_VERSIONS))


def test_in_a_process_of_its_own() -> None:
    """Patches are for good, and Triton reads TRITON_INTERPRET once."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    _check_unknown()
    if IS_KNOWN:
        _check_results()
