"""Patches of Triton's interpreter that take most of the time from an operation on few elements, with the same results.

The interpreter builds the type of every value and the tensor of every constant anew, and patches Triton's language
again for each device function that a kernel calls. With these patches each is built once. They replace internals, as
they are in Triton 3.6 to 3.9.
"""

import dataclasses
import functools
import gc
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic

KNOWN_VERSIONS = ("3.6", "3.7", "3.8", "3.9")  # whose internals the patches fit
MOST_CONSTANTS, MOST_SHARED = 4096, 4096  # tensors of numbers that are kept, elements of each

_done: list[bool] = []


def hurry() -> None:
    """Make this process's interpreter faster, for good; calling it twice is fine.

    On a Triton that is not in KNOWN_VERSIONS the interpreter stays as it is, and the first call warns.
    """
    if _done:
        return
    _done.append(True)
    if ".".join(triton.__version__.split(".")[:2]) not in KNOWN_VERSIONS:
        known = f"{KNOWN_VERSIONS[0]} to {KNOWN_VERSIONS[-1]}"
        text = f"Triton {triton.__version__}: its interpreter stays unpatched and slow, the patches are for {known}"
        warnings.warn(text, stacklevel=2)
        return
    from triton.runtime import interpreter  # an internal module, which another Triton may lack

    _patch_language_once(interpreter)
    _call_directly(interpreter)
    _name_types_once(interpreter)
    _share_constants()
    _convert_by_shifts_and_tables(interpreter)
    _spread_booleans(interpreter)
    gc.set_threshold(50_000, 20, 100)  # values of the interpreter die young, and are looked at all the time else
    options = interpreter.interpreter_builder.options  # the overflow checks cost time, and no test reads them
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def rewrite(package: str) -> None:
    """Rewrite all jit functions of a package as their first call does: forked processes need not."""
    from triton.runtime import interpreter

    for thing in gc.get_objects():
        if type(thing) is interpreter.InterpretedFunction and thing.fn.__module__.startswith(package):
            thing.rewrite()


def _patch_language_once(interpreter: Any) -> None:
    """Patch the language once, for good, not again for each launch and each device function."""
    patch, patch_core = interpreter._patch_lang, interpreter._patch_lang_core

    @functools.cache
    def languages(function: Callable[..., Any]) -> list[Any]:
        return [language for language in (tl, tl.core) if language in function.__globals__.values()]

    def patch_once(function: Callable[..., Any]) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages(function)):
            patch(function)
        return interpreter._LangPatchScope()  # of which there is nothing to restore

    def patch_core_and_types(language: Any, scope: Any) -> None:
        patch_core(language, scope)
        scope.set_attr(language.dtype, "to_ir", _itself)

    interpreter._patch_lang, interpreter._patch_lang_core = patch_once, patch_core_and_types


def _itself(self: Any, builder: Any) -> Any:
    """A type is its own IR type in the interpreter."""
    return self


def _call_directly(interpreter: Any) -> None:
    """Call the functions of Triton's language without the two wrappers that give them their `_semantic`."""
    checking = core.builtin(_itself).__code__

    def patch_attr(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is checking else member
        semantic = interpreter.interpreter_semantic
        if inspect.ismodule(place):
            scope.set_attr(place, name, functools.partial(function, _semantic=semantic))
            return

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = patch_attr


def _share_constants() -> None:
    """Make the tensor of a plain number once for all operands of a shape and type; leave fitting operands as they are.

    No operation of the interpreter writes to an operand.
    """
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    numbers, widened = (int, float, bool), ("fp16", "bf16")  # the latter by a division
    known: dict[Any, Any] = {}

    def constant(self: Any, number: Any, beside: Any, first: bool, options: tuple[bool, ...]) -> Any:
        """Both operands, of which one is a number and the other stands beside it."""
        key = type(number), number, beside.dtype.name, beside.type.name, first, options
        made = known.get(key)
        if made is None:
            pair = check(self, number, beside, *options) if first else check(self, beside, number, *options)
            made = pair[0 if first else 1]
            if pair[1 if first else 0] is not beside or made.handle.data.size > MOST_SHARED:
                return pair
            if len(known) >= MOST_CONSTANTS:
                known.clear()
            known[key] = made
        return (made, beside) if first else (beside, made)

    def check_quickly(
        self: Any,
        lhs: Any,
        rhs: Any,
        lhs_ptr: Any = False,
        rhs_ptr: Any = False,
        cast: Any = True,
        divided: Any = False,
    ) -> Any:
        options = lhs_ptr, rhs_ptr, cast, divided
        if type(lhs) is core.tensor:
            if type(rhs) in numbers:
                return constant(self, rhs, lhs, False, options)
            if type(rhs) is core.tensor:
                kind = lhs.dtype
                same = type(kind) is core.dtype and type(rhs.dtype) is core.dtype and kind.name == rhs.dtype.name
                if same and not (divided and kind.name in widened):
                    return self.broadcast_impl_value(lhs, rhs)
        elif type(rhs) is core.tensor and type(lhs) in numbers:
            return constant(self, lhs, rhs, True, options)
        return check(self, lhs, rhs, *options)

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type.described[3], rhs.type.described[3]
        if left == right:
            return lhs, rhs
        if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
            return broadcast(self, lhs, rhs)
        shape = [max(a, b) for a, b in zip(left, right, strict=True)]
        return tuple(
            operand if same == tuple(shape) else spread(self, operand, shape)
            for operand, same in ((lhs, left), (rhs, right))
        )

    def spread(self: Any, operand: Any, shape: list[int]) -> Any:
        kind = core.block_type(operand.dtype, shape)
        return core.tensor(self.builder.create_broadcast(operand.handle, shape), kind)

    TritonSemantic.binary_op_type_checking_impl = check_quickly
    TritonSemantic.broadcast_impl_value = broadcast_others


def _spread_booleans(interpreter: Any) -> None:
    """A block of a scalar's comparison is of booleans, not of what was compared: Triton 3.9 takes no other masks."""
    splat = interpreter.InterpreterBuilder.create_splat

    def splat_booleans(self: Any, kind: Any, value: Any) -> Any:
        made = splat(self, kind, value)
        if value.data.dtype == numpy.bool_:
            made.data = made.data.astype(numpy.bool_)
        return made

    interpreter.InterpreterBuilder.create_splat = splat_booleans


def _convert_by_shifts_and_tables(interpreter: Any) -> None:
    """Convert between bfloat16 and float32 by a shift, and floats of a byte by a table."""
    convert, tables = interpreter._convert_float, {}
    shifted = {("bf16", "fp32"): (0x7F80, 0x7F, 16), ("fp32", "bf16"): (0x7F800000, 0x7FFFFF, -16)}

    def convert_quickly(data: Any, kind: Any, to: Any, rounding: Any) -> Any:
        if (found := shifted.get((kind.name, to.name))) and rounding is None:
            exponent, significand, shift = found
            bits = data.view(numpy.uint16 if shift > 0 else numpy.uint32)
            if not (((bits & exponent) == 0) & ((bits & significand) != 0)).any():  # other results are Triton's own
                if shift > 0:
                    return bits.astype(numpy.uint32) << shift
                return (bits >> -shift).astype(numpy.uint16)
        if kind.primitive_bitwidth == 8:
            key = kind.name, to.name, rounding
            if key not in tables:
                tables[key] = convert(numpy.arange(256, dtype=numpy.uint8), kind, to, rounding)
            return tables[key][data.view(numpy.uint8)]
        return convert(data, kind, to, rounding)

    def keep(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter._convert_float = convert_quickly
    interpreter.TensorHandle.__init__ = keep  # without a check of sizes


def _name_types_once(interpreter: Any) -> None:
    """Look up NumPy types once, build block types and shapes once, and unwrap plain values without further checks."""
    find, numpys = interpreter._get_np_dtype, {}
    plain = (int, bool, float, str, core.tensor, core.dtype, core.block_type, core.pointer_type, type(None))

    def numpy_type(kind: Any) -> Any:
        found = numpys.get(kind.scalar.name)
        if found is None:
            found = numpys[kind.scalar.name] = find(kind)
        return found

    interpreter._get_np_dtype = numpy_type
    core.block_type.to_ir = core.pointer_type.to_ir = _itself
    _share_block_types()
    _share_shapes()
    unwrap = core._unwrap_if_constexpr

    def unwrap_plain(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrap_plain


def _share_block_types() -> None:
    """Block types of the same element type and shape share their attributes."""
    make, known = core.block_type.__init__, {}

    def remember(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[getattr(size, "value", size) for size in shape]
        found = known.get(key)
        if found is None:
            make(self, element_ty, shape)
            known[key] = self.__dict__
        else:
            self.__dict__ = found

    core.block_type.__init__ = remember


def _share_shapes() -> None:
    """Values of the same type share the objects that describe it."""

    @functools.cache
    def shape_of(*sizes: int) -> tuple[Any, Any, tuple[int, ...]]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes]), sizes

    def describe(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name
        self.handle, self.type = handle, type
        try:
            self.dtype, self.numel, self.shape, _ = type.described
        except AttributeError:
            type.described = type.scalar, *(shape_of(*type.shape) if type.is_block() else shape_of())
            self.dtype, self.numel, self.shape, _ = type.described

    core.tensor.__init__ = describe
