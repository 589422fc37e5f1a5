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

    def _first(call: ScaleCall) -> tuple[torch.Tensor, Plan | None]:
        weights = _SCALE.made(call, functools.partial(_checked, call))  # made once for the same weights
        ...
        return result, plan  # of later calls like this one; None: each is checked and computed anew

    _SCALE = Operation("scale", ScaleCall, _first, launch=Plan.launch, result="output", new=_new_output)

    def scale(x, factor, bias=None, block_shape=None, output=None):
        return _SCALE(ScaleCall(x, factor, bias, block_shape, output))
"""

import collections
import functools
import inspect
import itertools
import operator
import threading
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, TypeVar

import torch
from torch.library import custom_op

from ep_moe.functional.plans import keep, plan_cache

Weight = Annotated[torch.Tensor, "weight"]
Written = Annotated[torch.Tensor, "written"]

Call = TypeVar("Call", bound=tuple[Any, ...])
Result = TypeVar("Result")
Made = TypeVar("Made")
Returned = TypeVar("Returned")
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
_LIES = operator.attrgetter("shape", "dtype")  # the address identifies the device
_NONES = itertools.repeat(None)
_is_tensor = functools.partial(operator.is_not, None)


class Operation(Generic[Call, Result]):
    """What calls of one declaration share: the operator that torch.compile calls, and the plans of each thread.

    A call with a property `written` has copies of tensors in its plan; it says how often torch has written these
    (`writes`), None if that is unknown, so that nothing is kept.

    Args:
        name: of the operator, behind "ep_moe::". call: the NamedTuple.
        compute: the eager call. With `launch` it returns a plan of later calls too, or None; the plan may hold views of
            the weights alone, and ends with the first of them. Nothing is kept while a CUDA graph is captured, whose
            memory the plan might have.
        launch: the result of a later call by its plan; None, with nothing launched, if it is to be computed anew.
        state: what plans depend on beside the arguments.
        new: makes undefined results of a call, for the operator's fake, or for `result` if a compiled call has none.
        result: the field that `compute` and the operator write. If None, both return new tensors.
        num_results: the number of new tensors; `compute` returns a tuple unless it is 1.
    """

    def __init__(
        self,
        name: str,
        call: type[Call],
        compute: Callable[[Call], Any],
        *,
        launch: Callable[[Any, Call], Result | None] | None = None,
        state: Callable[[], object] | None = None,
        new: Callable[[Call], Any] | None = None,
        result: str | None = None,
        num_results: int = 1,
    ) -> None:
        self._name, self._call, self._compute, self._launch, self._state = name, call, compute, launch, state
        self._new, self._result = new, result
        written = getattr(call, "written", None)
        self._written = None if written is None else written.fget
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
            return self._compute(call) if self._launch is None else self._by_plan(call)
        if self._result is None:
            return self._operator(*call)
        found = getattr(call, self._result)
        if found is None:
            assert self._new is not None
            found = self._new(call)
            call = call._replace(**{self._result: found})  # type: ignore[attr-defined]
        self._operator(*call)
        return found

    def _by_plan(self, call: Call) -> Result:
        """The result by the plan of an earlier call like this one, else by a first call, whose plan is kept."""
        assert self._launch is not None
        written = () if self._written is None else self._written(call)
        inputs, more = self._inputs(call), () if self._state is None else (self._state(),)
        device = inputs[0].device
        if self._optional:
            more = *more, *map(operator.is_, inputs, _NONES)
            inputs = (*filter(_is_tensor, inputs),)
        if self._has_lists:
            more = *more, *map(repr, self._lists(call))
        if self._has_weights:
            more = *more, *_identities(self._weights(call))
        key = self._name, *more, *self._numbers(call), *map(_LIKE, inputs), *map(torch.Tensor.stride, inputs)
        kept = plan_cache(threading.get_ident()).get(key)
        if kept is not None and kept[1] == written:
            found = self._launch(kept[0], call)
            if found is not None:
                return found
        result: Result
        result, plan = self._compute(call)
        if plan is not None and written is not None:
            keep(key, (plan, written), device, self._weights(call))
        return result

    def made(self, call: Call, make: Callable[[], Made], *more: object) -> Made:
        """What `make` returned for a call with the same weights and an equal `more`, or returns now. Local.

        It is kept as a plan is.
        """
        written = () if self._written is None else self._written(call)
        if written is None:
            return make()
        weights = self._weights(call)
        key = "weights", self._name, *more, *_identities(weights)
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
            call = self._call._make(arguments)  # type: ignore[attr-defined]
            found = self._compute(call) if self._launch is None else self._by_plan(call)
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


def _identities(tensors: Sequence[torch.Tensor | None]) -> tuple[object, ...]:
    """Ids, addresses, shapes, dtypes and strides for a key: `tensor.data = ...` changes one of the last three."""
    present = [tensor for tensor in tensors if tensor is not None]
    places = *map(torch.Tensor.data_ptr, present), *map(_LIES, present), *map(torch.Tensor.stride, present)
    return (*map(id, tensors), *places)


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


def with_arguments(
    fields: type, names: str = "", **defaults: Any
) -> Callable[[Callable[[Any], Returned]], Callable[..., Returned]]:
    """Turn a function of one named tuple into a function of arguments, with a signature of its own.

    The tuple is one of `fields` if that has all names, else one of these names.

    Args:
        fields: a NamedTuple, whose fields give arguments of the same names their types and defaults.
        names: of the arguments, in their order, "*" in front of those that are passed by name alone; all of `fields` by
            default. defaults: of other arguments, and values of fields that are no argument.
    """
    known, types = inspect.signature(fields).parameters, typing.get_type_hints(fields)
    positional, _, named = (names or " ".join(known)).partition("*")
    kinds = [(inspect.Parameter.POSITIONAL_OR_KEYWORD, positional), (inspect.Parameter.KEYWORD_ONLY, named)]
    parameters = [
        inspect.Parameter(
            name,
            kind,
            default=defaults.get(name, known[name].default if name in known else inspect.Parameter.empty),
            annotation=types.get(name, Any),
        )
        for kind, part in kinds
        for name in part.split()
    ]
    values = [one.default for one in parameters if one.default is not inspect.Parameter.empty]
    listed, most = [one.name for one in parameters], len(positional.split())
    fixed = {name: value for name, value in defaults.items() if name not in listed}
    whole, part = listed == list(known), set(listed) <= set(known)

    def turn(function: Callable[[Any], Returned]) -> Callable[..., Returned]:
        own = fields if whole else collections.namedtuple(function.__name__, listed, defaults=values)
        arguments: Any = own

        def call(*given: Any, **by_name: Any) -> Returned:
            if len(given) > most:
                raise TypeError(f"{function.__name__}() takes {most} positional arguments, {len(given)} were given")
            found = arguments(*given, **by_name)
            return function(fields(**dict(zip(listed, found, strict=True)), **fixed) if part and not whole else found)

        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(call, attribute, getattr(function, attribute))
        returned = inspect.signature(function).return_annotation
        call.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
        return call

    return turn
