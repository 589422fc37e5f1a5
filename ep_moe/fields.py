"""Fields of configs: their types, limits and help, and values read from files checked against them."""

import dataclasses
import enum
import functools
import math
import numbers
import types
import typing
from collections.abc import Collection
from typing import Annotated, Any

_PLAIN: dict[type, tuple[type, str]] = {  # accepted type and its name in errors; a bool is not accepted as a number
    bool: (bool, "true or false"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
}
_SHOWN_CHARS = 200


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Field:
    """What a config's field means and which values it takes: `tokens: Annotated[int, Field(help="...", at_least=1)]`.

    `check_fields` refuses other values, and the command line makes an option of the field. The limits of a tuple are
    those of its elements, of which it needs one or more.

    Args:
        help: the option's help, without the full stop that ends it.
        at_least: the least number. multiple_of: only positive multiples. positive: only numbers above 0.
        choices: the only values; the help ends in them.
        option: how the command line names it, if not as the config does; "--on/--off" for both values of a bool.
    """

    help: str = ""
    at_least: float | None = None
    multiple_of: int | None = None
    positive: bool = False
    choices: Collection[str] = ()
    option: str = ""

    @property
    def text(self) -> str:
        """The help as the command line shows it."""
        return f"{self.help}{': ' if self.choices else ''}{', '.join(self.choices)}."

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError with the value and its limit unless the field may have it; None always fits. Local."""
        if isinstance(value, tuple):
            self._check_elements(name, value)
            return
        if value is None:
            return
        at_least, step = self.at_least, self.multiple_of
        require(at_least is None or value >= at_least, f"{name} ({shown(value)}) must be at least {at_least}")
        require(not self.positive or value > 0, f"{name} ({shown(value)}) must be positive")
        if step is not None:
            require(value > 0 and value % step == 0, f"{name} ({value}) must be a positive multiple of {step}")
        if self.choices:
            require(value in self.choices, f"{name} ({shown(value)}) is not one of {', '.join(self.choices)}")

    def _check_elements(self, name: str, values: tuple[Any, ...]) -> None:
        if self.at_least is not None:
            fits = bool(values) and min(values) >= self.at_least
            require(fits, f"{name} ({shown(values)}) must be one or more numbers of at least {self.at_least}")
        require(bool(values), f"{name} (()) must have one or more elements")
        for value in values:
            self.check(name, value)


_NO_LIMITS = Field()


def shown(value: Any) -> str:
    """The repr of a value, truncated if long, for errors."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a nested {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def typed(value: Any, wanted: Any, name: str) -> Any:
    """Convert a value to the type `wanted`: an integer to a float, a list to a tuple, a name to an enum member.

    Args:
        value: of a config's field, or read from a file. name: its name in errors.
        wanted: bool, int, float, str, an enum or another class; a tuple of any number of one of these; one or None.
    Errors: ValueError names the value and the wanted type; a float must be finite. Local.
    """
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        [wanted] = set(arguments) - {type(None)}
        return None if value is None else typed(value, wanted, name)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        require(isinstance(value, list | tuple), f"{name} ({shown(value)}) is not a list")
        return tuple(typed(element, arguments[0], f"{name}[{index}]") for index, element in enumerate(value))
    require(isinstance(wanted, type), f"{name} ({shown(value)}) cannot be set from a file")
    if wanted in _PLAIN:
        fitting, what = _PLAIN[wanted]
        fits = isinstance(value, fitting) and (wanted is bool or not isinstance(value, bool))
        require(fits, f"{name} ({shown(value)}) is not {what}")
        return _finite(value, name) if wanted is float else int(value) if wanted is int else value
    if issubclass(wanted, enum.Enum):
        named = isinstance(value, str | int) and not isinstance(value, bool)
        require(named, f"{name} ({shown(value)}) is not a name or number")
        allowed = [member.value for member in wanted]
        require(value in allowed, f"{name} ({shown(value)}) is not one of {', '.join(map(str, allowed))}")
        return wanted(value)
    require(isinstance(value, wanted), f"{name} ({shown(value)}) is no {wanted.__module__}.{wanted.__qualname__}")
    return value


def _finite(value: Any, name: str) -> float:
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest float
        number = math.inf
    require(math.isfinite(number), f"{name} ({shown(value)}) must be finite")
    return number


def described(config_type: Any) -> dict[str, tuple[Any, Field]]:
    """The annotated type of each field of a dataclass, and its `Field`, one without limits if it has none. Local."""
    return _described(config_type)


@functools.cache
def _described(config_type: Any) -> dict[str, tuple[Any, Field]]:
    hints = typing.get_type_hints(config_type, include_extras=True)
    found = {}
    for name in (field.name for field in dataclasses.fields(config_type)):
        wanted, field = hints[name], _NO_LIMITS
        if typing.get_origin(wanted) is Annotated:
            wanted, field = typing.get_args(wanted)[:2]
        found[name] = (wanted, field)
    return found


def field_types(config_type: type[Any]) -> dict[str, Any]:
    """The annotated type of each field of a dataclass. Local."""
    return {name: wanted for name, (wanted, _) in described(config_type).items()}


def check_fields(config: Any) -> None:
    """Check every field of a frozen dataclass against its annotation, and replace it by the result of `typed`.

    The first line of a config's `__post_init__`, so that errors come when a config is made, not at its first use.
    Errors: ValueError names the field, its value and the wanted type or the limit of its `Field`. Local.
    """
    for name, (wanted, field) in described(type(config)).items():
        object.__setattr__(config, name, typed(getattr(config, name), wanted, name))
        if field is not _NO_LIMITS:
            field.check(name, getattr(config, name))


def check_keys(found: Collection[str], known: Collection[str], source: str, *, optional: Collection[str] = ()) -> None:
    """Raise ValueError that names `source` and the keys that are unknown, or missing and not optional. Local."""
    unknown = sorted(set(found) - set(known))
    missing = [key for key in known if key not in found and key not in optional]
    require(not unknown, f"{source}: unknown key {', '.join(unknown)}; known: {', '.join(known)}")
    require(not missing, f"{source}: missing key {', '.join(missing)}")


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds. Local."""
    if not condition:
        raise ValueError(message)
