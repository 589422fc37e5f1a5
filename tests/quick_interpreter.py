"""Patches of Triton's interpreter that halve the time of an operation on few elements, with the same results.

The interpreter builds the type of every value anew, and patches Triton's language again for each device function that a
kernel calls. With these patches a type is built once. They replace internals, as they are in Triton 3.6 and 3.7.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language import core

KNOWN_VERSIONS = ("3.6", "3.7")  # whose internals the patches fit

_done: list[bool] = []


def hurry() -> None:
    """Make this process's interpreter faster, for good; calling it twice is fine.

    On a Triton that is not in KNOWN_VERSIONS the interpreter stays as it is, and the first call warns.
    """
    if _done:
        return
    _done.append(True)
    if ".".join(triton.__version__.split(".")[:2]) not in KNOWN_VERSIONS:
        known = " and ".join(KNOWN_VERSIONS)
        text = f"Triton {triton.__version__}: its interpreter stays unpatched and slow, the patches are for {known}"
        warnings.warn(text, stacklevel=2)
        return
    from triton.runtime import interpreter  # an internal module, which another Triton may lack

    _patch_language_once(interpreter)
    _name_types_once(interpreter)
    options = interpreter.interpreter_builder.options  # the overflow checks cost time, and no test reads them
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _patch_language_once(interpreter: Any) -> None:
    """Patch the language once per kernel, not again for each device function that it calls."""
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
    """A type is its own IR type in the interpreter."""
    return self


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
    """Values of the same shape share the objects that describe it."""

    @functools.cache
    def shape_of(*sizes: int) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def describe(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(*type.shape) if type.is_block() else shape_of()

    core.tensor.__init__ = describe
