"""Options of the command line, derived from the fields of configs: their types, defaults, help and limits."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ep_moe.fields import Field, described
from ep_moe.names import SCHEME_NAMES

Config = TypeVar("Config")
_OF_SCHEMES = ("scheme", "schemes", "payload")  # fields that `ep-moe formats` lists the values of
_NO_FIELDS: Mapping[str, Field] = types.MappingProxyType({})


def options_of(
    config_type: type[Any],
    defaults: Any = None,
    *,
    leave_out: Collection[str] = (),
    instead: Mapping[str, Field] = _NO_FIELDS,
    panel: str | None = None,
) -> list[inspect.Parameter]:
    """A keyword parameter for typer for each field of a config: an argument if it has no default, else an option.

    A tuple is an option that may be repeated; a bool that is False by default has no option to turn it off.

    Args:
        defaults: a config whose values replace the fields' defaults. leave_out: fields without an option.
        instead: replaces the `Field` of some fields. panel: of the help, for the options.
    Local.
    """
    parameters = []
    for field, (name, (wanted, own)) in zip(
        dataclasses.fields(config_type), described(config_type).items(), strict=True
    ):
        if name in leave_out:
            continue
        described_as = instead.get(name, own)
        default = field.default if defaults is None else getattr(defaults, name)
        if typing.get_origin(wanted) is tuple:
            wanted = list[typing.get_args(wanted)[0]]  # type: ignore[misc]
            default = list(default) if isinstance(default, tuple) else default
        info: Any = typer.Argument(help=described_as.text)
        if default is not dataclasses.MISSING:
            flag = [f"--{name.replace('_', '-')}"] if default is False else []
            values = SCHEME_NAMES if name in _OF_SCHEMES else described_as.choices  # which a shell completes
            values = ("auto", *values) if name in _OF_SCHEMES and default == "auto" else values
            info = typer.Option(
                *([described_as.option] if described_as.option else flag),
                help=described_as.text,
                metavar="NAME" if values else _metavar(wanted),
                autocompletion=_completion(values) if values else None,
                rich_help_panel=panel,
            )
        else:
            default = inspect.Parameter.empty
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=Annotated[wanted, info]))
    return parameters


def _completion(values: Collection[str]) -> Callable[[str], list[str]]:
    """A function for typer: the values that begin as what is typed."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def _metavar(wanted: Any) -> str:
    """How the help shows the value of an option of a type."""
    kinds = [kind for kind in (wanted, *typing.get_args(wanted)) if isinstance(kind, type) and kind is not type(None)]
    return {int: "N", float: "X", Path: "FILE", str: "TEXT"}.get(kinds[-1], "NAME")


def config_of(config_type: type[Config], values: dict[str, Any]) -> Config:
    """Make a config of its options, which are removed from `values`. Errors: ValueError of the config. Local."""
    names = [field.name for field in dataclasses.fields(config_type) if field.name in values]  # type: ignore[arg-type]
    return config_type(**{name: values.pop(name) for name in names})
