"""Command-line flags from config dataclasses: one mechanism, no flag is written twice.

A command declares a config as a parameter; `with_configs` turns that parameter into one flag a
field, named after the field, with the field's `doc` as help and its default shown. A flag that is
not given is not passed on, so that defaults live in the dataclass alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagGroup:
    """The flags of one dataclass: `prefix` goes before each name; fields in `skip` get none."""

    config: type[Any]
    prefix: str = ""
    skip: tuple[str, ...] = ()
    optional: bool = False
    """None instead of a config while no flag of the group is given."""
    panel: str = "Options"
    """Heading of the group in `--help`."""
    complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Adds values that follow from the given ones."""

    def parameters(self) -> list[inspect.Parameter]:
        """One keyword-only parameter for each flag."""
        hints = typing.get_type_hints(self.config)
        return [self._parameter(field, hints[field.name]) for field in self._fields()]

    def build(self, values: Mapping[str, Any]) -> Any:
        """The config of the given flags among `values`; raises what its constructor raises."""
        given: dict[str, Any] = {}
        for field in self._fields():
            value = values.get(self.prefix + field.name)
            if isinstance(field.default, bool):
                given |= {field.name: not field.default} if value else {}
            elif value is not None and value != []:
                given[field.name] = tuple(value) if isinstance(value, list) else value
        if self.complete is not None:
            given = self.complete(given)
        return None if self.optional and not given else self.config(**given)

    def _fields(self) -> list[dataclasses.Field[Any]]:
        return [f for f in dataclasses.fields(self.config) if f.name not in self.skip]

    def _parameter(self, field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
        name = self.prefix + field.name
        option = typer.Option(
            None,
            _declaration(name, field.default),
            help=_help(field),
            show_default=False,
            rich_help_panel=self.panel,
        )
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=_flag_type(hint)
        )


def _declaration(name: str, default: Any) -> str:
    """The flag's name; a switch that is on by default is turned off by `--no-` and its name."""
    flag = name.replace("_", "-")
    return f"--no-{flag}" if default is True else f"--{flag}"


def _help(field: dataclasses.Field[Any]) -> str:
    """The field's `doc`, with its default where that says something."""
    doc, default = field.metadata["doc"], field.default
    if default is True:
        return f"turn off: {doc}"
    if default is dataclasses.MISSING or default is False or default in (None, (), ""):
        return str(doc)
    return f"{doc} (default {default})"


def _flag_type(hint: Any) -> Any:
    """The type of a flag: a tuple is a flag given several times; each may be absent."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        hint = list[typing.get_args(hint)[0]]  # type: ignore[misc]
    return hint | None


def with_configs(**groups: FlagGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the command's parameters named in `groups` become flags.

    The decorated function takes the flags' values and calls the command with built configs.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(command, include_extras=True)
        own = [
            p.replace(annotation=hints[p.name])
            for p in inspect.signature(command).parameters.values()
            if p.name not in groups
        ]
        flags = {name: group.parameters() for name, group in groups.items()}

        def run(**values: Any) -> None:
            configs = {name: group.build(values) for name, group in groups.items()}
            command(**{p.name: values[p.name] for p in own}, **configs)

        expanded = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        for parameters in flags.values():
            expanded += parameters
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {p.name: p.annotation for p in expanded} | {"return": None}
        cast(Any, run).__signature__ = inspect.Signature(expanded)
        return run

    return decorate
