"""A public call as one declaration, from which its operator and the keys of what is prepared for it follow.

A call is a NamedTuple of the arguments that have a meaning here. A tensor is an input, of which a plan depends on the
shape, strides, dtype and device. A tensor that is marked `Weight` is known by its identity and its address. One that is
marked `Written` is an input that the operator writes. All other fields are numbers, which are part of a key.

    class ScaleCall(NamedTuple):
        x: torch.Tensor
        factor: Weight
        bias: Weight | None
        block_shape: list[int] | None
        output: Written | None

    def _compute(call: ScaleCall) -> torch.Tensor:
        key, plan = _SCALE.find(call)  # the plan that an earlier call like this one has kept, or None
        if plan is not None:
            return plan(call)
        weights = _SCALE.made(call, functools.partial(_checked, call))  # made once for the same weights
        ...
        _SCALE.keep(key, plan, call)
        return result

    _SCALE = Operation("scale", ScaleCall, _compute, result="output", new=lambda call: torch.empty_like(call.x))

    def scale(x, factor, bias=None, block_shape=None, output=None):
        return _SCALE(ScaleCall(x, factor, bias, block_shape, output))
"""

import functools
import itertools
import operator
import threading
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

import torch
from torch.library import custom_op

from ep_moe.functional.plans import identities, keep, plan_cache

Weight = Annotated[torch.Tensor, "weight"]
Written = Annotated[torch.Tensor, "written"]

Call = TypeVar("Call", bound=tuple[Any, ...])
Result = TypeVar("Result")
Made = TypeVar("Made")
Key = tuple[object, ...]
_TYPES: dict[object, str] = {
    torch.Tensor: "Tensor",
    bool: "bool",
    int: "SymInt",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
    list[int]: "int[]",
}
_LIKE = operator.attrgetter("shape", "dtype", "device")
_NONES = itertools.repeat(None)
_is_tensor = functools.partial(operator.is_not, None)


class Operation(Generic[Call, Result]):
    """What calls of one declaration share: the operator that torch.compile calls, and the plans of each thread.

    Args:
        name: of the operator, behind "ep_moe::". call: the NamedTuple. compute: the eager call.
        new: makes undefined results of a call, for the operator's fake, or for `result` if a compiled call has none.
        result: the field that `compute` and the operator write. If None, both return new tensors.
        num_results: the number of new tensors; `compute` returns a tuple unless it is 1.
    """

    def __init__(
        self,
        name: str,
        call: type[Call],
        compute: Callable[[Call], Result],
        *,
        new: Callable[[Call], Any] | None = None,
        result: str | None = None,
        num_results: int = 1,
    ) -> None:
        self._call, self._compute, self._new, self._result, self._name = call, compute, new, result, name
        fields = {name: _parts(hint) for name, hint in typing.get_type_hints(call, include_extras=True).items()}
        tensors = {name: mark for name, (kind, mark, _) in fields.items() if kind is torch.Tensor}
        lists = [name for name, (kind, *_) in fields.items() if kind == list[int]]
        places = {name: place for place, name in enumerate(fields)}
        inputs = [name for name, mark in tensors.items() if mark != "weight"]
        self._inputs = _getter([places[name] for name in inputs])
        self._weights = _getter([places[name] for name in tensors if name not in inputs])
        self._numbers = _getter([places[name] for name in fields if name not in tensors and name not in lists])
        self._lists = _getter([places[name] for name in lists])
        self._has_lists, self._has_weights = bool(lists), "weight" in tensors.values()
        self._optional = any(fields[name][2] for name in inputs)
        self._operator = self._custom_op(fields, num_results)

    def __call__(self, call: Call) -> Result:
        """The call, by the operator under torch.compile."""
        if not torch.compiler.is_compiling():
            return self._compute(call)
        if self._result is None:
            return self._operator(*call)
        found = getattr(call, self._result)
        if found is None:
            assert self._new is not None
            found = self._new(call)
            call = call._replace(**{self._result: found})  # type: ignore[attr-defined]
        self._operator(*call)
        return found

    def find(self, call: Call, *more: object, written: tuple[int, ...] | None = ()) -> tuple[Key | None, Any]:
        """The key of a call, and the plan that was kept by it, or None.

        Args:
            more: of the key. written: how often torch has written the tensors of which a plan has copies (`writes`);
                None if that is unknown, so that there is neither a key nor a plan.
        Local, no host sync.
        """
        if written is None:
            return None, None
        inputs = self._inputs(call)
        if self._optional:
            more = *more, *map(operator.is_, inputs, _NONES)
            inputs = (*filter(_is_tensor, inputs),)
        if self._has_lists:
            more = *more, *map(repr, self._lists(call))
        if self._has_weights:
            more = *more, *identities(self._weights(call))
        key = self._name, *more, *self._numbers(call), *map(_LIKE, inputs), *map(torch.Tensor.stride, inputs)
        kept = plan_cache(threading.get_ident()).get(key)
        return key, kept[0] if kept is not None and kept[1] == written else None

    def keep(self, key: Key | None, plan: object, call: Call, *, written: tuple[int, ...] | None = ()) -> None:
        """Find a plan by a key from now on, as long as the call's weights exist, of which it may hold views alone.

        Nothing is kept without a key, and while a CUDA graph is captured, whose memory the plan might have. Local.
        """
        if key is not None and written is not None:
            keep(key, (plan, written), self._inputs(call)[0].device, self._weights(call))

    def made(self, call: Call, make: Callable[[], Made], *more: object, written: tuple[int, ...] | None = ()) -> Made:
        """What `make` returned for a call with the same weights and an equal `more`, or returns now. Local.

        Args: written: as of `find`. What `make` returns is kept as a plan is.
        """
        if written is None:
            return make()
        weights = self._weights(call)
        key = "weights", self._name, *more, *identities(weights)
        kept = plan_cache(threading.get_ident()).get(key)
        if kept is not None and kept[1] == written:
            found: Made = kept[0]
            return found
        made = make()
        keep(key, (made, written), self._inputs(call)[0].device, weights)
        return made

    def _custom_op(self, fields: dict[str, "_Parts"], num_results: int) -> Any:
        writes = [name for name, (_, mark, _) in fields.items() if mark == "written" or name == self._result]
        letters = dict(zip(writes, "abcdefgh", strict=False))

        def argument(name: str) -> str:
            kind, _, optional = fields[name]
            alias = f"({letters[name]}!)" if name in letters else ""
            return f"{_TYPES[kind]}{alias}{'?' * optional} {name}"

        def run(*arguments: Any) -> Any:
            found = self._compute(self._call._make(arguments))  # type: ignore[attr-defined]
            return found if self._result is None else None

        def fake(*arguments: Any) -> Any:
            if self._result is None:
                assert self._new is not None
                return self._new(self._call._make(arguments))  # type: ignore[attr-defined]
            return None  # the real call checks its arguments

        returns = "()" if self._result else "Tensor" if num_results == 1 else f"({', '.join(['Tensor'] * num_results)})"
        schema = f"({', '.join(map(argument, fields))}) -> {returns}"
        found = custom_op(f"ep_moe::{self._name}", run, mutates_args=writes, schema=schema)
        found.register_fake(fake)
        return found


_Parts = tuple[Any, str, bool]


def _parts(hint: Any) -> _Parts:
    """The type of a field, how it is marked ("" not at all), and whether it may be None."""
    optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
    if optional:
        [hint] = (one for one in typing.get_args(hint) if one is not types.NoneType)
    if typing.get_origin(hint) is Annotated:
        kind, mark = typing.get_args(hint)
        return kind, mark, optional
    return hint, "", optional


def _getter(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that returns the fields at these places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    first = places[0] if places else 0
    return operator.itemgetter(slice(first, first + len(places)))
