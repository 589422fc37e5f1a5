"""How commands show their help: panels of options, a line or two each, for terminals of 80 columns and more."""

import io
import shutil
import sys
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

WIDTHS = (60, 120)  # columns: the least and the most
MOST_OPTION_COLUMNS = 25
MOST_DEFAULTS = 5  # of an option that may be repeated
COMMON = "Every command"
OPTIONS = "Options"  # the panel of those that name none


class Command(TyperCommand):
    """A command whose help is compact; its options' `rich_help_panel` names their panel."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help to the formatter."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if not getattr(param, "hidden", False):
                is_argument = param.param_type_name == "argument"
                title = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or OPTIONS
                panels.setdefault(COMMON if "--help" in param.opts else title, []).append(_row(param))
        words = ctx.command_path.split()[1:]
        table, variable = ".".join(words), "_".join(words).upper()
        note = f"Options may also be variables EP_MOE_{variable}_..., or stand in [{table}] of a --config file."
        formatter.write(_rendered(self, ctx, panels, note))


class Group(TyperGroup):
    """A group of commands, whose `rich_help_panel` names their panel."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help to the formatter."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            assert command is not None
            title = getattr(command, "rich_help_panel", None) or "Commands"
            first, _, _ = (command.help or "").partition("\n\n")
            panels.setdefault(title, []).append((name, " ".join(first.split())))
        panels[OPTIONS] = [_row(param) for param in self.get_params(ctx)]
        formatter.write(_rendered(self, ctx, panels, f"`{ctx.command_path} COMMAND -h` has the options of a command."))


def _row(param: Any) -> tuple[str, str]:
    """An option's names and value, and its help with the default."""
    if param.param_type_name == "argument":
        return (param.metavar or param.name).upper() + ("..." if param.nargs == -1 else ""), param.help or ""
    names = [*param.opts, *(name for name in param.secondary_opts if name != f"--no-{param.opts[0][2:]}")]
    if len(param.secondary_opts) > len(names) - len(param.opts):
        names[0] = f"--[no-]{names[0][2:]}"
    value = "" if param.is_flag else f" {param.metavar or 'TEXT'}"
    default, help_text = param.default, param.help or ""
    shown = "" if param.is_flag or callable(default) or default is None or default in ("", [], ()) else default
    values = [getattr(each, "value", each) for each in (shown if isinstance(shown, list | tuple) else [shown])]
    shown = " ".join(map(str, values[:MOST_DEFAULTS])) + (" ..." if len(values) > MOST_DEFAULTS else "")
    return ", ".join(sorted(names, key=len)) + value, f"{help_text} [{shown}]" if shown != "" else help_text


def _rendered(command: Any, ctx: Any, panels: dict[str, list[tuple[str, str]]], note: str) -> str:
    from rich import box
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    least, most = WIDTHS
    width = min(max(shutil.get_terminal_size((80, 24)).columns, least), most)
    console = Console(file=io.StringIO(), width=width, force_terminal=sys.stdout.isatty(), highlight=False)
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    console.print(Text.assemble(("Usage: ", "bold"), usage))
    console.print()
    for paragraph in _paragraphs(command.help or ""):
        console.print(Text(paragraph))
    columns = min(max(len(names) for rows in panels.values() for names, _ in rows), MOST_OPTION_COLUMNS)
    for title, rows in panels.items():
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(width=columns)
        table.add_column(ratio=1)
        for names, text in rows:
            table.add_row(Text(names, style="cyan"), Text(text))
        console.print(
            Panel(table, title=title, title_align="left", border_style="dim", box=box.ROUNDED, padding=(0, 1))
        )
    console.print(Text(note, style="dim"))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def _paragraphs(text: str) -> Iterable[str]:
    return (" ".join(part.split()) for part in text.split("\n\n"))
