"""The command line of every command: flags, over `TANDEM_*` variables, over a `--config` file.

```
 --config FILE ─▶ words ─┐
 TANDEM_PAGE_SIZE ─▶ words ─┤ what a higher layer gives replaces the lower one's ─▶ argparse
 the command line ───────┘
```

`--page-size` is `page-size` in a file and `TANDEM_PAGE_SIZE` in the environment. A flag that may be repeated takes
a list in a file, and words as in a shell in the environment.
"""

import argparse
import difflib
import os
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml
from typing_extensions import override

_FALSE = {"", "0", "false", "no", "off"}
_TRUE = {"1", "true", "yes", "on"}
_LAYERS = ("help", "help_all", "config")  # flags that no lower layer may give
_HELP = {"-h", "--help", "--help-all"}


class Parser(argparse.ArgumentParser):
    """Reads a command line with the layers below it, and answers a wrong one in one line.

    Args:
        common: The flags that `--help` shows; `--help-all` shows the others too. Empty: `--help` shows all.
        environment: Where `TANDEM_*` variables are read from.
    """

    def __init__(
        self,
        prog: str | None = None,
        *,
        common: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        **options: Any,
    ) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        if common:
            options.setdefault("usage", "%(prog)s [FLAGS]")
        super().__init__(prog, allow_abbrev=False, **options)
        self._common = frozenset(common)
        self._environment = environment
        if common:
            self.add_argument(
                "--help-all", action=_HelpAll, nargs=0, help="show every flag and exit"
            )
        self.add_argument(
            "--config",
            metavar="FILE",
            default=None,
            help="read flags from a YAML or TOML file, such as `page-size: 32`; TANDEM_PAGE_SIZE and "
            "--page-size both override it",
        )

    def ignore(self, names: Iterable[str]) -> None:
        """Accept flags of other servers, with any values; `ignored` has the names of those given."""
        self.set_defaults(ignored=[])
        for name in names:
            self.add_argument(
                name, nargs="*", action=_Ignored, dest="ignored", help=argparse.SUPPRESS
            )

    @override
    def parse_known_args(  # type: ignore[override]  # argparse's overloads have no common signature
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        self._add_negations()
        is_help = not _HELP.isdisjoint(given)  # a wrong file must not hide the help
        lower = [] if is_help else self._lower_layers(given)
        parsed, unknown = super().parse_known_args([*lower, *given], namespace)
        for name in _LAYERS:  # flags of this parser, not of the command
            if hasattr(parsed, name):
                delattr(parsed, name)
        return parsed, unknown

    @override
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self.unknown_flag(unknown[0]))
        return parsed

    def flags(self, args: Sequence[str]) -> tuple[list[list[str]], list[list[str]]]:
        """Return the flags of the environment and the file, and those of a command line.

        Each is its name and its values. Together they need neither the environment nor the file.
        """
        own = [words for words in split_flags(args) if words[0].partition("=")[0] != "--config"]
        return split_flags(self._lower_layers(args)), own

    def variables(self) -> set[str]:
        """Return the variables of the environment that give a flag."""
        return {"TANDEM_CONFIG", *map(_variable_of, self._layered_actions())}

    def unknown_flag(self, word: str) -> str:
        """Return the sentence about a word that no flag takes, with the nearest flag."""
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {name!r}"
        names = sorted(self._visible_names())
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"see {self.prog} --help{'-all' if self._common else ''}"
        )
        return f"there is no flag {name}: {hint}"

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    @override
    def format_help(self) -> str:
        if not self._common:
            return super().format_help()
        shown = {action for action in self._actions if self._is_shown(action)}
        helps = [(action, action.help) for action in self._actions if action not in shown]
        for action, _ in helps:
            action.help = argparse.SUPPRESS
        num_more = sum(text is not argparse.SUPPRESS for _, text in helps)
        epilog = self.epilog
        self.epilog = f"{num_more} more flags: {self.prog} --help-all\n\n{epilog or ''}".rstrip()
        try:
            return super().format_help()
        finally:
            self.epilog = epilog
            for action, text in helps:
                action.help = text

    def format_all_help(self) -> str:
        """Return the help of every flag."""
        return super().format_help()

    def _is_shown(self, action: argparse.Action) -> bool:
        return (
            not action.option_strings
            or action.dest in _LAYERS
            or not self._common.isdisjoint(action.option_strings)
        )

    def _visible_names(self) -> Iterator[str]:
        for action in self._actions:
            if action.help is not argparse.SUPPRESS:
                yield from action.option_strings

    def _add_negations(self) -> None:
        """Let `--no-x` take back an `--x` of a lower layer."""
        for action in list(self._actions):
            name = _name_of(action)
            is_switch = action.nargs == 0 and isinstance(action.const, bool)
            if is_switch and f"--no-{name}" not in self._option_string_actions:
                self.add_argument(
                    f"--no-{name}",
                    dest=action.dest,
                    action="store_false" if action.const else "store_true",
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )

    def _lower_layers(self, given: Sequence[str]) -> list[str]:
        """Return the words of environment and file that no higher layer overrides."""
        taken = self._dests_in(given)
        words: list[str] = []
        for action in self._layered_actions():
            variable = _variable_of(action)
            # Empty is not set: as compose files and scripts pass on what nobody gave.
            if action.dest not in taken and (text := self._environment.get(variable)):
                taken.add(action.dest)
                words += self._words_of(action, _typed(action, text, variable, self), variable)
        for name, value in self._config_file(given).items():
            where = f"{self._config_path(given)}: {name}"
            flag = "--" + name.replace("_", "-")
            found = self._option_string_actions.get(flag)
            if found is None or found.dest in _LAYERS:
                self.error(f"{where}: {self.unknown_flag(flag)}")
            if found.dest not in taken and value is not None:
                words += self._words_of(found, value, where)
        return words

    def _layered_actions(self) -> Iterator[argparse.Action]:
        for action in self._actions:
            is_hidden = action.help is argparse.SUPPRESS
            if action.option_strings and action.dest not in _LAYERS and not is_hidden:
                yield action

    def _dests_in(self, words: Sequence[str]) -> set[str]:
        names = (word.partition("=")[0] for word in words if word.startswith("-"))
        actions = (self._option_string_actions.get(name) for name in names)
        return {action.dest for action in actions if action is not None}

    def _config_path(self, given: Sequence[str]) -> str:
        path = self._environment.get("TANDEM_CONFIG", "")
        for word, following in pairwise([*given, ""]):
            if word.startswith("--config="):
                path = word.partition("=")[2]
            elif word == "--config":
                path = following
        return path

    def _config_file(self, given: Sequence[str]) -> dict[str, Any]:
        path = self._config_path(given)
        if not path or not any(self._layered_actions()):  # a command without flags reads none
            return {}
        try:
            text = Path(path).read_text(encoding="utf-8")
            read = tomllib.loads(text) if path.endswith(".toml") else yaml.safe_load(text)
        except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
            self.error(f"--config {path}: {error}")
        except yaml.YAMLError as error:
            # Without the text of the line: it may be a secret.
            mark = getattr(error, "problem_mark", None)
            where = "" if mark is None else f" in line {mark.line + 1}"
            self.error(f"--config {path}: not YAML{where}: {getattr(error, 'problem', '')}")
        if read is None:
            return {}
        if not isinstance(read, dict) or not all(isinstance(key, str) for key in read):
            self.error(f"--config {path}: write one flag a line, such as `page-size: 32`")
        return read

    def _words_of(self, action: argparse.Action, value: Any, where: str) -> list[str]:
        """Return the words of a command line that give a flag this value."""
        name = f"--{_name_of(action)}"
        if action.nargs == 0:
            if not isinstance(value, bool):
                self.error(f"{where}: give true or false")
            return [name] if value else []
        if value is False and "off" in (action.choices or ()):
            value = "off"  # as YAML reads it
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, dict) for each in values):
            self.error(f"{where}: give a value or a list")
        if action.nargs in ("+", "*"):
            flat = [str(w) for each in values for w in (each if isinstance(each, list) else [each])]
            return [name, *flat]
        return [f"{name}={each}" for each in values]


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of examples, and shows defaults that are not empty."""

    @override
    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_none = action.default is True or action.default in (None, False, [], "")
        if has_none or "(default:" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class _Ignored(argparse.Action):
    """Collects the names of flags that mean nothing here."""

    @override
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.ignored = [*namespace.ignored, option_string]


class _HelpAll(argparse.Action):
    """Prints the help of every flag, and exits."""

    @override
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.format_all_help())
        parser.exit()


def split_flags(words: Sequence[str]) -> list[list[str]]:
    """Return the words of each flag of a command line: its name, then its values."""
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append([])
        flags[-1].append(word)
    return flags


def _name_of(action: argparse.Action) -> str:
    """Return the first long name of a flag, without its dashes: what files and the environment call it."""
    long = [name for name in action.option_strings if name.startswith("--")]
    return long[0].removeprefix("--") if long else ""


def _variable_of(action: argparse.Action) -> str:
    return "TANDEM_" + _name_of(action).upper().replace("-", "_")


def _typed(action: argparse.Action, text: str, variable: str, parser: Parser) -> Any:
    """Return what a variable's text gives a flag."""
    if action.nargs == 0:
        if text.lower() not in _TRUE | _FALSE:
            parser.error(f"{variable} is {text!r}: give 1 or 0")
        return text.lower() in _TRUE
    is_repeated = isinstance(action.default, list) or action.nargs in ("+", "*")
    try:
        return shlex.split(text) if is_repeated else text
    except ValueError as error:
        parser.error(f"{variable}: {error}")
