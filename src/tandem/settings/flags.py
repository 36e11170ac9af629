"""Config fields that carry their flags: the parser is built from them, and parsed arguments become a config.

```
 page_size: Annotated[int, Flag("--page-size", help="tokens in a page", ge=1)] = 16
      │ add_flags(parser, Config)                 │ read_flags(Config, parsed)
      ▼                                           ▼
 --page-size, TANDEM_PAGE_SIZE, page-size:      Config(page_size=32), or SettingInvalid that names the flag
```

A field's type determines the flag's values: `bool` is a switch that inverts the default, `Literal` lists choices, and a
tuple is a flag that may be repeated. The flags of a nested config are included. Other fields have no flags.
"""

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec

T = TypeVar("T")


class SettingInvalid(ValueError):
    """A flag, variable or file sets an invalid value. The message says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def for_operators(self) -> str:
        """The message, and the documentation page if there is one."""
        return self.message


def error_prefix(prog: str) -> str:
    """Return the start of a command's error line, by which `tandem up` finds the error of a process."""
    return f"{prog}: error: "


class Flag:
    """The command-line flag of a field.

    Args:
        names: Names of the flag. Each works in files and the environment too.
        help: Help text: a noun phrase or an imperative, with the unit.
        group: Heading in `--help`; empty: that of the previous field.
        metavar: Placeholder of the value in help.
        ge: Minimum.
        le: Maximum.
        scale: Factor from the flag's value to the field's: 0.001 for a flag in ms and a field in s.
        nargs: `+` for a flag that takes several values at once.
        parse: Converts the flag's text, or list of texts, to the field's value; raises `SettingInvalid`.
        synonyms: Additional values, each mapped to the value it stands for.
        aliases: Hidden flags that set this field, each mapped to a constant or to a function of its value.
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
    """A flag and the field that it sets.

    Attributes:
        dest: Name in the parsed arguments: the field's path through nested configs.
        kind: Type of the field's value.
        default: Default of the field.
    """

    dest: str
    flag: Flag
    kind: Any
    default: Any

    @property
    def is_repeated(self) -> bool:
        """Whether the flag may be repeated."""
        return typing.get_origin(self.kind) is tuple


def options_of(config: type, prefix: str = "") -> Iterator[Option]:
    """Yield the options of a config and its nested configs, in the order of the fields."""
    hints = typing.get_type_hints(config, include_extras=True)
    for name, default in _fields(config):
        kind = hints[name]
        flags: list[Flag] = []
        if typing.get_origin(kind) is Annotated:
            flags = [each for each in kind.__metadata__ if isinstance(each, Flag)]
            kind = kind.__origin__
        if flags:
            yield Option(prefix + name, flags[0], _value_type(kind), default)
        elif _is_config(_value_type(kind)):
            yield from options_of(_value_type(kind), f"{prefix}{name}.")


def add_flags(
    parser: argparse.ArgumentParser,
    config: type,
    *,
    defaults: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    only: Collection[str] | None = None,
) -> None:
    """Add the flags of a config to a parser.

    Args:
        defaults: Values by field path that replace the config's defaults.
        without: Paths of fields whose flags are left out.
        only: Paths of fields whose flags are added; None: all.
    """
    groups: dict[str, Any] = {}
    group: Any = parser.add_argument_group("options")
    for option in options_of(config):
        if heading := option.flag.group:
            if heading not in groups:
                groups[heading] = parser.add_argument_group(heading)
            group = groups[heading]
        is_included = only is None or _is_within(option.dest, only)
        if is_included and not _is_within(option.dest, without):
            _add(group, option, (defaults or {}).get(option.dest, option.default))


def read_flags(config: type[T], parsed: argparse.Namespace, *, prefix: str = "", **fixed: Any) -> T:
    """Return the config that the parsed arguments describe.

    Args:
        parsed: Arguments from a parser of `add_flags`; a field without an argument keeps its default.
        fixed: Values of fields that have no flag.

    Raises:
        SettingInvalid: A value is invalid. The message names the flag and the valid values, and the variable or the
            line of the config file that set the value.
    """
    hints = typing.get_type_hints(config, include_extras=True)
    values: dict[str, Any] = {}
    own = {
        option.dest: option for option in options_of(config, prefix) if option.dest in vars(parsed)
    }
    for name, _ in _fields(config):
        option = own.get(prefix + name)
        if option is not None:
            values[name] = _read(option, parsed)
        elif name not in fixed and any(dest.startswith(f"{prefix}{name}.") for dest in own):
            kind = _value_type(hints[name])
            read = read_flags(kind, parsed, prefix=f"{prefix}{name}.")
            is_absent = kind is not hints[name] and read == kind()  # optional, and no flag was set
            values[name] = None if is_absent else read
    return config(**{**values, **fixed})


def check_flags(config: type, parsed: argparse.Namespace) -> None:
    """Check each parsed value of a config by itself.

    Raises:
        SettingInvalid: A value is invalid; see `read_flags`.
    """
    for option in options_of(config):
        if option.dest in vars(parsed):
            _read(option, parsed)


# Placeholder of a number in help, by the last word of its flag.
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


def _read(option: Option, parsed: argparse.Namespace) -> Any:
    """Return the field's value; begin the error of an invalid value with the value's source."""
    try:
        return _value(option, getattr(parsed, option.dest))
    except SettingInvalid as error:
        if source := getattr(parsed, "sources", {}).get(option.dest):
            error.message = f"{source}: {error.message}"
            error.args = (error.message,)
        raise


def _value(option: Option, value: Any) -> Any:
    flag = option.flag
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_number = isinstance(value, int) or math.isfinite(value)
        if not (is_number and flag.ge <= value <= flag.le):
            bounds = (
                f"at least {flag.ge:g}" if math.isinf(flag.le) else f"{flag.ge:g} to {flag.le:g}"
            )
            raise SettingInvalid(f"{'/'.join(flag.names)} is {value:g}: use {bounds}")
        if flag.scale != 1:
            value = value * flag.scale
    if isinstance(value, str):
        value = flag.synonyms.get(value, value)
    # Do not parse an empty default, which means unset. Parse an empty value that overrides a different default.
    if flag.parse is not None and (value or value != option.default or option.is_repeated):
        value = flag.parse(value)
    return tuple(value) if option.is_repeated and isinstance(value, list) else value


def _is_within(dest: str, paths: Collection[str]) -> bool:
    return any(dest == path or dest.startswith(f"{path}.") for path in paths)


def _is_config(kind: Any) -> bool:
    return isinstance(kind, type) and (
        issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)
    )


def _value_type(kind: Any) -> Any:
    """Return the first type of a union that is not None; any other type is returned as it is."""
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


# Flags that several commands share.
PORT = Flag("--port", metavar="PORT", ge=0, le=65535, help="HTTP port; 0: any free port")
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
    help="interval of heartbeats on links between processes; use the same value for all processes; a lost link "
    "is detected within four intervals",
)


def _one_of(flag: str, value: str, *choices: str) -> str:
    if value not in choices:
        raise SettingInvalid(f"{flag} is {value}: use one of {', '.join(choices)}")
    return value
