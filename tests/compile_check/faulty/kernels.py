"""Kernels that break one rule each, as their names say, and right ones that are close to it."""

import triton
import triton.language as tl


@triton.jit
def _spilling_kernel(x_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    tl.store(x_ptr + place, x / tl.sum(x, 0))


@triton.jit
def _product(x_ptr, w_ptr, hidden, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr):
    row, column, k = tl.arange(0, M)[:, None], tl.arange(0, N)[:, None], tl.arange(0, K)[None, :]
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, hidden, K):
        x = tl.load(x_ptr + row * hidden + start + k)
        w = tl.load(w_ptr + column * hidden + start + k)
        if WIDEN:
            x = x.to(tl.float16)
            w = w.to(tl.float16)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee" if WIDEN else "tf32")
    return total


@triton.jit
def _product_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    flag_ptr,
    y_ptr,
    hidden,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Right for fp8 and large tiles. A bias of 2 bytes per thread and a flag of 1 byte are no payload."""
    total = _product(x_ptr, w_ptr, hidden, M, N, K, WIDEN)
    total += tl.load(bias_ptr + tl.arange(0, N)).to(tl.float32)[None, :]
    if tl.load(flag_ptr) != 0:
        total = -total
    tl.store(y_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], total.to(y_ptr.dtype.element_ty))


@triton.jit
def _decoded_product_kernel(x_ptr, w_ptr, y_ptr, hidden, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """w of a byte each, widened in registers, is the left operand."""
    row, column, k = tl.arange(0, M)[:, None], tl.arange(0, N)[:, None], tl.arange(0, K)[None, :]
    total = tl.zeros([N, M], tl.float32)
    for start in range(0, hidden, K):
        x = tl.load(x_ptr + row * hidden + start + k)
        w = tl.load(w_ptr + column * hidden + start + k).to(tl.float32).to(tl.bfloat16)
        total = tl.dot(w, tl.trans(x), total)
    tl.store(y_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], tl.trans(total).to(tl.bfloat16))


@triton.jit
def _copy_kernel(x_ptr, table_ptr, hidden, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row to an address from a table; narrow unless ALIGNED declares the address aligned."""
    to = tl.load(table_ptr + tl.program_id(0)).to(tl.pointer_type(x_ptr.dtype.element_ty))
    if ALIGNED:
        to = tl.multiple_of(to, 16)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(to + column, tl.load(x_ptr + column, mask=column < hidden), mask=column < hidden)


@triton.jit
def _strided_load_kernel(x_ptr, y_ptr, stride: tl.int64, BLOCK: tl.constexpr):
    """Load with a stride that is 1, which the annotation hides from the compiler."""
    column = tl.arange(0, BLOCK)
    tl.store(y_ptr + column, tl.load(x_ptr + column * stride))


@triton.jit
def _polling_kernel(word_ptr, y_ptr, BEHIND: tl.constexpr):
    """Poll four words, and store the products of each two; right if that is done behind the loop."""
    words, waiting = tl.zeros([4], tl.int32), tl.full([], 1, tl.int32)
    while waiting > 0:
        words = tl.load(word_ptr + tl.arange(0, 4), volatile=True)
        waiting = (tl.min(words, 0) == 0).to(tl.int32)
        if not BEHIND and waiting == 0:
            _store_products(words, y_ptr)
    if BEHIND:
        _store_products(words, y_ptr)


@triton.jit
def publish(word_ptr, word, cache_modifier: tl.constexpr):
    tl.store(word_ptr, word, cache_modifier=cache_modifier)


@triton.jit
def _publishing_kernel(x_ptr, cache_modifier: tl.constexpr):
    """Right if it writes through to the system."""
    index = tl.arange(0, 512)
    publish(x_ptr + index, index.to(tl.int64), cache_modifier)


@triton.jit
def _store_products(words, y_ptr):
    index = tl.arange(0, 4)
    tl.store(y_ptr + index[:, None] * 4 + index[None, :], words[:, None] * words[None, :])


@triton.jit
def _not_compiling_kernel(x_ptr):
    tl.store(x_ptr, tl.arange(0, 3))


@triton.jit
def _forgotten_kernel(x_ptr):
    tl.store(x_ptr, _used_by_forgotten(tl.load(x_ptr)))


@triton.jit
def _used_by_forgotten(x):
    return x + 1


def _make():
    @triton.jit
    def in_a_dict(x):
        return x + 2

    return {"closure": in_a_dict}


class Holder:
    """Holds a jit function that no name of a module refers to directly."""

    functions = _make()
