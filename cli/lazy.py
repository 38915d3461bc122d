"""Command groups that import a command only when it is called."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from dora_pipe.core.system.console import say, write_to

Panels = Mapping[str, Mapping[str, tuple[str, str] | tuple[str, str, str]]]
"""By panel and command: location ``module:name``, summary, example without the program's name."""

EXIT_INTERRUPTED: Final = 130

SETTINGS: Final[Mapping[str, Any]] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


class _Commands(MutableMapping[str, Any]):
    def __init__(self, panels: Panels) -> None:
        self._places = {
            name: (target, *example)
            for commands in panels.values()
            for name, (target, _, *example) in commands.items()
        }
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _command(name, *self._places[name])
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._places[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _command(name: str, target: str, example: str = "") -> Any:
    module, _, attribute = target.partition(":")
    command = getattr(import_module(f"dora_pipe.{module}"), attribute)
    if isinstance(command, typer.Typer):
        return get_command(command)
    single = typer.Typer(**SETTINGS)
    single.command(name, epilog=_examples([example]) if example else None)(command)
    return get_command(single)


def _examples(examples: Sequence[str]) -> str:
    return "\b\nExample:\n" + "\n".join(f"  dora-pipe {example}" for example in examples)


def print_version(requested: bool) -> None:
    """Print the version and exit; `doctor` prints those of other packages."""
    if requested:
        from dora_pipe import __version__

        write_to(sys.stdout, f"dora-pipe {__version__}\n")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", is_eager=True, callback=print_version, help="Show the version and exit."
    ),
]


@contextmanager
def _ctrl_c_is_a_line() -> Iterator[None]:
    """Typer alone would exit silently."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def lazy_app(
    panels: Panels,
    *,
    name: str,
    help: str,
    version: bool = False,
) -> typer.Typer:
    """Return an application or command group; `version` adds `--version`."""

    class Group(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands = _Commands(panels)

        def make_context(self, *args: Any, **extra: Any) -> Any:
            with _ctrl_c_is_a_line():
                return super().make_context(*args, **extra)

        def invoke(self, ctx: Any) -> Any:
            with _ctrl_c_is_a_line():
                return super().invoke(ctx)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            width = max(len(command) for commands in panels.values() for command in commands)
            for panel, commands in panels.items():
                with formatter.section(panel):
                    lines = [(name.ljust(width), what) for name, (_, what, *_) in commands.items()]
                    formatter.write_dl(lines)

    def begin() -> None:
        pass

    def begin_with_version(version: VersionOption = False) -> None:
        pass

    examples = [
        example
        for commands in panels.values()
        for _, _, *rest in commands.values()
        for example in rest
    ]
    return typer.Typer(
        name=name,
        cls=Group,
        callback=begin_with_version if version else begin,
        help=help,
        epilog=_examples(examples) if examples and not version else None,
        no_args_is_help=True,
        **SETTINGS,
    )
