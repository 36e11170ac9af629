"""Options: a field of a config carries its flag, and the parser and the config come from it.

```
 page_size: Annotated[int, Flag("--page-size", help="tokens in a page", ge=1)] = 16
      │ add_flags(parser, Config)                 │ read_flags(Config, parsed)
      ▼                                           ▼
 --page-size, TANDEM_PAGE_SIZE, page-size:      Config(page_size=32), or ConfigInvalid naming the flag
```

A field's type gives the flag its values: `bool` is a switch that turns the default over, `Literal` gives choices, a
tuple is a flag that may be repeated. A field that is a config itself brings its own flags; other fields have none.
"""

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import bare_host

T = TypeVar("T")


class Flag:
    """How a field is given on a command line.

    Args:
        names: The first one is how errors, files and the environment call it.
        help: A noun phrase or an imperative, with its unit.
        group: The heading in `--help`; empty: that of the field before.
        metavar: Stands for the value in help.
        ge: The least value.
        le: The largest value.
        scale: The field's unit in the flag's: 0.001 for a flag in ms and a field in s.
        nargs: `+` for a flag that takes several values at once.
        parse: Turns the flag's text, or its list of them, into the field's value; raises `ConfigInvalid`.
        synonyms: More values that are accepted, with what each of them means.
        aliases: Hidden flags that give this field: either a constant, or a function of their value.
    """

    def __init__(
        self,
        *names: str,
        help: str,  # noqa: A002  # argparse's name
        group: str = "",
        metavar: str | None = None,
        ge: float = -math.inf,
        le: float = math.inf,
        scale: float = 1,
        nargs: Literal["+"] | None = None,
        parse: Callable[[Any], Any] | None = None,
        synonyms: Mapping[str, str] = types.MappingProxyType({}),
        aliases: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> None:
        self.names, self.help, self.group, self.metavar = names, help, group, metavar
        self.ge, self.le, self.scale, self.nargs, self.parse = ge, le, scale, nargs, parse
        self.synonyms, self.aliases = synonyms, aliases


@dataclass(frozen=True)
class Option:
    """A flag, and the field that it gives.

    Attributes:
        dest: Of the parsed arguments: the field's path through nested configs.
    """

    dest: str
    flag: Flag
    kind: Any
    default: Any

    @property
    def is_repeated(self) -> bool:
        """Whether the flag may be given several times."""
        return typing.get_origin(self.kind) is tuple


def options_of(config: type, prefix: str = "") -> Iterator[Option]:
    """Yield the options of a config and of the configs in it, in the order of their fields."""
    hints = typing.get_type_hints(config, include_extras=True)
    for name, default in _fields(config):
        kind = hints[name]
        flags: list[Flag] = []
        if typing.get_origin(kind) is Annotated:
            flags = [each for each in kind.__metadata__ if isinstance(each, Flag)]
            kind = kind.__origin__
        if flags:
            yield Option(prefix + name, flags[0], _plain(kind), default)
        elif _is_config(_plain(kind)):
            yield from options_of(_plain(kind), f"{prefix}{name}.")


def add_flags(
    parser: argparse.ArgumentParser,
    config: type,
    *,
    defaults: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    only: Collection[str] | None = None,
) -> None:
    """Give a parser the flags of a config.

    Args:
        defaults: Of some fields, in place of the config's own.
        without: Fields, by their path, that this command has no flag for.
        only: Fields, by their path, that it has flags for; None: all.
    """
    groups: dict[str, Any] = {}
    group: Any = parser.add_argument_group("options")
    for option in options_of(config):
        if heading := option.flag.group:
            if heading not in groups:
                groups[heading] = parser.add_argument_group(heading)
            group = groups[heading]
        is_wanted = only is None or _is_within(option.dest, only)
        if is_wanted and not _is_within(option.dest, without):
            _add(group, option, (defaults or {}).get(option.dest, option.default))


def read_flags(config: type[T], parsed: argparse.Namespace, *, prefix: str = "", **given: Any) -> T:
    """Return the config that parsed arguments describe.

    Args:
        parsed: Of a parser that `add_flags` prepared; a field without an argument keeps its default.
        given: Fields that no flag gives.

    Raises:
        ConfigInvalid: Naming the flag, and the values that it takes.
    """
    hints = typing.get_type_hints(config, include_extras=True)
    values: dict[str, Any] = {}
    own = {
        option.dest: option for option in options_of(config, prefix) if option.dest in vars(parsed)
    }
    for name, _ in _fields(config):
        option = own.get(prefix + name)
        if option is not None:
            values[name] = _value(option, getattr(parsed, option.dest))
        elif name not in given and any(dest.startswith(f"{prefix}{name}.") for dest in own):
            kind = _plain(hints[name])
            read = read_flags(kind, parsed, prefix=f"{prefix}{name}.")
            is_absent = kind is not hints[name] and read == kind()  # optional, and no flag given
            values[name] = None if is_absent else read
    return config(**{**values, **given})


# What stands for a number in help, by the last word of its flag.
_UNITS = {"ms": "MS", "s": "SECONDS", "bytes": "BYTES"}


def _add(group: Any, option: Option, default: Any) -> None:
    flag = option.flag
    settings: dict[str, Any] = {"dest": option.dest, "help": flag.help}
    if option.kind is bool:
        settings |= {"action": "store_false" if default else "store_true"}
    elif option.is_repeated:
        settings |= {"action": "append", "default": [], "metavar": flag.metavar}
        settings |= {"nargs": flag.nargs} if flag.nargs else {}
    else:
        kind = option.kind
        choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else None
        shown = default
        if flag.scale != 1 and default is not None:
            shown = default / flag.scale
            shown = int(shown) if shown == int(shown) and isinstance(default, int) else shown
        settings |= {"default": shown, "metavar": flag.metavar}
        if choices:
            names = [choice for choice in choices if choice != ""]
            settings |= {"choices": [*names, *flag.synonyms]}
        elif kind in (int, float):
            settings["type"] = kind
            unit = _UNITS.get(flag.names[0].rpartition("-")[2], "N")
            settings["metavar"] = flag.metavar or unit
    group.add_argument(*flag.names, **settings)
    for name, meaning in flag.aliases.items():
        shape: dict[str, Any] = {
            "dest": option.dest,
            "help": argparse.SUPPRESS,
            "default": argparse.SUPPRESS,
        }
        if callable(meaning):
            shape |= {"type": meaning, "action": "append" if option.is_repeated else "store"}
        else:
            shape |= {"const": meaning, "action": "store_const"}
        group.add_argument(name, **shape)


def _value(option: Option, value: Any) -> Any:
    flag = option.flag
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_number = isinstance(value, int) or math.isfinite(value)
        if not (is_number and flag.ge <= value <= flag.le):
            bounds = (
                f"at least {flag.ge:g}" if math.isinf(flag.le) else f"{flag.ge:g} to {flag.le:g}"
            )
            raise ConfigInvalid(f"{'/'.join(flag.names)} is {value:g}: give {bounds}")
        if flag.scale != 1:
            value = value * flag.scale
    if isinstance(value, str):
        value = flag.synonyms.get(value, value)
    # An empty default stands for nothing; an empty value that was given is checked.
    if flag.parse is not None and (value or value != option.default or option.is_repeated):
        value = flag.parse(value)
    return tuple(value) if option.is_repeated and isinstance(value, list) else value


def _is_within(dest: str, paths: Collection[str]) -> bool:
    return any(dest == path or dest.startswith(f"{path}.") for path in paths)


def _is_config(kind: Any) -> bool:
    return isinstance(kind, type) and (
        issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)
    )


def _plain(kind: Any) -> Any:
    """Return the type of a value that may also be None, or one of other literals."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(each for each in typing.get_args(kind) if each is not type(None))
    return kind


def _fields(config: Any) -> list[tuple[str, Any]]:
    is_dataclass = dataclasses.is_dataclass(config)
    found: Any = dataclasses.fields(config) if is_dataclass else msgspec.structs.fields(config)
    return [(each.name, _default(each)) for each in found]


def _default(each: Any) -> Any:
    missing = (dataclasses.MISSING, msgspec.NODEFAULT)
    if not any(each.default is none for none in missing):
        return each.default
    return None if any(each.default_factory is none for none in missing) else each.default_factory()


# Flags of several commands.
HOST = Flag(
    "--host",
    group="server",
    metavar="ADDRESS",
    help="address to listen on",
    parse=partial(bare_host, "--host"),
)
PORT = Flag("--port", metavar="PORT", ge=0, le=65535, help="port of HTTP; 0: any free port")
LOG_LEVEL = Flag(
    "--log-level",
    metavar="LEVEL",
    help="lowest level of log lines: debug, info, warning or error",
    parse=lambda level: _one_of("--log-level", level.lower(), "debug", "info", "warning", "error"),
)
LOG_FORMAT = Flag("--log-format", help="auto: console on a terminal, else JSON lines")
HEARTBEAT = Flag(
    "--heartbeat-interval-ms",
    metavar="MS",
    help="time between heartbeats on links between processes, equal on all of them; a lost link is "
    "noticed within four",
)


def _one_of(flag: str, value: str, *choices: str) -> str:
    if value not in choices:
        raise ConfigInvalid(f"{flag} is {value}: give one of {', '.join(choices)}")
    return value
