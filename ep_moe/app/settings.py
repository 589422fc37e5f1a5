"""Where options have their values from, besides the command line: variables EP_MOE_*, and a TOML file.

The command line comes first, then the variable, the file, the default. A table of the file is named as its command:
[serve], [bench.layer]; keys are the names of options without the dashes. Keys at the top are for every command that has
the option.
"""

import enum
import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from ep_moe.app.help import COMMON
from ep_moe.config import read_tables
from ep_moe.fields import require, shown
from ep_moe.logs import LEVELS

VARIABLES = "EP_MOE"  # the first words of all variables
USAGE_ERROR: Any = typer.BadParameter.__base__  # of the click that typer has
OTHER_KEYS = {"run": ("prompts", "new_tokens", "teacher_tokens", "window", "max_logit_diff")}  # of the file, no options


def read_settings(ctx: typer.Context, path: Path | None) -> Path | None:
    """Callback of --config: the file's values become defaults of the command's options.

    Errors: click's usage error names the file and the table, key or value that is wrong.
    """
    if path is not None and not ctx.resilient_parsing:
        try:
            ctx.default_map = _values(ctx, path)
        except ValueError as error:
            raise USAGE_ERROR(str(error), ctx) from None
    return path


def _values(ctx: typer.Context, path: Path) -> dict[str, Any]:
    require(path.is_file(), f"config ({str(path)!r}) is not a file")
    tables, group = read_tables(path), ctx.find_root().command
    words = ctx.command_path.split()[1:]
    _check_tables(group, tables, path, ())
    values = _of_all(group, {key: value for key, value in tables.items() if not isinstance(value, dict)}, ctx, path)
    own: Any = tables
    for word in words:
        own = own.get(word, {})
    known = _keys(ctx.command)
    for key, value in own.items():
        option = known.get(key.replace("_", "-"))
        if option is not None:
            values[option.name] = _converted(ctx, option, value, f"{path} [{'.'.join(words)}]: {key}")
    return values


def _of_all(group: Any, given: dict[str, Any], ctx: typer.Context, path: Path) -> dict[str, Any]:
    """Values of keys at the top for this command. Errors: ValueError for one that no command has."""
    known = _keys(ctx.command)
    everywhere = {key for command in _commands(group) for key in _keys(command)}
    values = {}
    for key, value in given.items():
        name = key.replace("_", "-")
        require(name in everywhere, f"{path}: {key} is no option of any command")
        if name in known:
            values[known[name].name] = _converted(ctx, known[name], value, f"{path}: {key}")
    return values


def _check_tables(group: Any, tables: dict[str, Any], path: Path, words: tuple[str, ...]) -> None:
    """Raise ValueError for tables of no command and for keys in them that are no options."""
    for name, table in tables.items():
        title, here = ".".join((*words, name)), (*words, name)
        if not isinstance(table, dict):
            require(not words, f"{path}: {title} is no table of a command")
            continue
        command = group.commands.get(name)
        require(command is not None, f"{path}: [{title}] is no command; known: {', '.join(group.commands)}")
        if hasattr(command, "commands"):
            _check_tables(command, table, path, here)
            continue
        known, others = _keys(command), OTHER_KEYS.get(title, ())
        wrong = [key for key in table if key.replace("_", "-") not in known and key not in others]
        message = f"{path} [{title}]: {', '.join(wrong)} is no option of ep-moe {' '.join(here)}"
        require(not wrong, f"{message}; known: {', '.join([*known, *others])}")


def _commands(group: Any) -> list[Any]:
    found: list[Any] = []
    for command in group.commands.values():
        found += _commands(command) if hasattr(command, "commands") else [command]
    return found


def _keys(command: Any) -> dict[str, Any]:
    """The options and arguments of a command by their keys."""
    found = {}
    for param in command.params:
        long = next((name for name in param.opts if name.startswith("--")), None)
        key = long[2:] if long else param.name
        if key not in ("config", "install-completion", "show-completion"):
            found[key] = param
    return found


def _converted(ctx: typer.Context, option: Any, value: Any, where: str) -> Any:
    """A value as a command line would give it. Errors: ValueError."""
    is_flag = getattr(option, "is_flag", False)
    many = getattr(option, "multiple", False) or option.nargs == -1
    what = "true or false" if is_flag else "a list of texts or numbers" if many else "a text or a number"
    elements = value if many and isinstance(value, list) else [value]
    plain = all(isinstance(each, bool if is_flag else str | int | float) for each in elements)
    plain = plain and (is_flag or not any(isinstance(each, bool) for each in elements))
    require(plain and isinstance(value, list) == many, f"{where} ({shown(value)}) is not {what}")
    texts = elements if is_flag else [str(each) for each in elements]
    try:
        option.process_value(ctx, texts if many else texts[0])
    except USAGE_ERROR as error:
        raise ValueError(f"{where} ({shown(value)}): {error.message.rstrip('.')}") from None
    return texts if many else texts[0]


def variable_of(error: Any) -> str:
    """The variable that holds the value a usage error is about, "" if that came from elsewhere."""
    param, ctx = getattr(error, "param", None), getattr(error, "ctx", None)
    if param is None or ctx is None:
        return ""
    source = ctx.get_parameter_source(param.name)
    if source is None or source.name != "ENVIRONMENT":
        return ""
    return param.envvar or f"{ctx.auto_envvar_prefix}_{param.name}".upper()


def given_elsewhere(ctx: Any) -> list[str]:
    """Options that variables or the file have set, as the command line would have them."""
    found: list[str] = []
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name)
        if param.expose_value and source is not None and source.name in ("ENVIRONMENT", "DEFAULT_MAP"):
            value = ctx.params[param.name]
            for each in value if isinstance(value, list | tuple) else [value]:
                each = each.value if isinstance(each, enum.Enum) else each
                if getattr(param, "is_flag", False):
                    found += [param.opts[0]] if each else param.secondary_opts[:1]
                else:
                    found += [param.opts[0], str(each)]
    return found


def _common(name: str, default: Any, annotation: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
    )


COMMON_OPTIONS = [
    _common(
        "config_file",
        None,
        Path | None,
        typer.Option(
            "--config",
            help="TOML file with values of options, by command.",
            metavar="FILE",
            envvar=f"{VARIABLES}_CONFIG",
            is_eager=True,
            callback=read_settings,
            rich_help_panel=COMMON,
        ),
    ),
    _common(
        "log_level",
        "info",
        str,
        typer.Option(
            help=f"Log lines on standard error: {', '.join(LEVELS)}.",
            metavar="LEVEL",
            envvar=f"{VARIABLES}_LOG_LEVEL",
            autocompletion=lambda: list(LEVELS),
            rich_help_panel=COMMON,
        ),
    ),
]
