"""The parser of every command. Flags override `TANDEM_*` variables, which override the `--config` file.

```
 --config FILE ────▶ words ─┐
 TANDEM_PAGE_SIZE ─▶ words ─┤ values of a higher layer replace those of a lower one ─▶ argparse
 command line ──────────────┘
```

`--page-size` is `page-size` in a file and `TANDEM_PAGE_SIZE` in the environment. A flag that may be repeated takes
a list in a file, and shell words in the environment. The other names of a flag work too. The parsed arguments record the source of each value in
`sources`, for errors about the value.
"""

import argparse
import difflib
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml
from typing_extensions import override

from tandem.settings.flags import error_prefix

_FALSE = {"", "0", "false", "no", "off"}
_TRUE = {"1", "true", "yes", "on"}
_LAYERS = ("help", "help_all", "config")  # flags that only the command line may set
_HELP = {"-h", "--help", "--help-all"}
# Kubernetes sets these variables in every container for a Service named `tandem` or `tandem-...`.
_OF_SERVICE = re.compile(
    r"TANDEM_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_HEADLESS_SERVICE = "use --discover-dns ROLE=HOST:PORT with the name of a headless Service"
# What to use instead of flags that were removed, either from every command or from the command that the key names.
_REMOVED = {
    "--directory": "no transport uses files; leave it out",
    "--transfer-directory": "use --transfer-backend tcp, or --kv-tier with a shared directory",
    "tandem batch --extra-request-body": "write the fields into the body of each request",
    "tandem batch --max-attempts": "a request has 5 attempts",
    "tandem batch --patience-s": "the command ends after 15 minutes without an answer; repeat it to resume",
    "tandem bench --burstiness": "arrivals of --request-rate are a Poisson process",
    "tandem bench --concurrency": "use --max-concurrency, and run the command once for each value",
    "tandem bench --disable-ignore-eos": "every answer has --output-len tokens",
    "tandem bench --extra-request-body": "leave it out; only the fields of the chosen --api are sent",
    "tandem bench --timeout-s": "a request fails after 300 s without data",
    "tandem bench --trace-speed": "use --request-rate",
    "tandem bench --warmup-requests": "one request is sent before each load",
    "tandem bench --num-warmups": "one request is sent before each load",
    **dict.fromkeys(
        (
            "tandem bench --dataset-path",
            "tandem bench --random-prefix-len",
            "tandem bench --random-range-ratio",
            "tandem bench --shared-prefix-tokens",
            "tandem bench --trace",
        ),
        "prompts are random and of equal length; use AIPerf or GuideLLM for others",
    ),
    "tandem doctor --json": "use the exit status, and read the table",
    "tandem doctor --no-measure": "use --transfer-backend with the name of one transport, which takes a second",
    "tandem doctor --node": "use GET /health and GET /server_info of the node",
    "tandem top --interval": "the screen is redrawn every second",
    "tandem top --json": "use `curl URL/overview`",
    **dict.fromkeys(
        (
            "--discover-kubernetes",
            "--kubernetes-prefill-selector",
            "--kubernetes-decode-selector",
            "--kubernetes-namespace",
            "--kubernetes-port",
            "--kubernetes-api",
        ),
        _HEADLESS_SERVICE,
    ),
}


def is_of_kubernetes(variable: str, value: str) -> bool:
    """Whether Kubernetes set this variable for a Service; `TANDEM_PORT` is then a URL, such as tcp://10.96.0.7:8000."""
    is_url = variable.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://"))
    return is_url or _OF_SERVICE.fullmatch(variable) is not None


class Parser(argparse.ArgumentParser):
    """Parses a command line together with the environment and the config file; reports errors in one line.

    Args:
        common: Flags that `--help` shows; `--help-all` shows all. Empty: `--help` shows all too.
        environment: Mapping from which `TANDEM_*` variables are read.
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
        super().__init__(prog, allow_abbrev=False, exit_on_error=False, **options)
        self._instead: Mapping[str, str] = {}
        self._common = frozenset(common)
        self._environment = environment
        all_help = "show every flag and exit" if common else argparse.SUPPRESS
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help=all_help)
        self.add_argument(
            "--config",
            metavar="FILE",
            default=None,
            help="read flags from a YAML or TOML file, such as `page-size: 32`; TANDEM_PAGE_SIZE and "
            "--page-size both override it",
        )

    def ignore(self, names: Iterable[str]) -> None:
        """Accept flags of other servers with any values; the argument `ignored` lists those that were set."""
        self.set_defaults(ignored=[])
        for name in names:
            self.add_argument(
                name, nargs="*", action=_Ignored, dest="ignored", help=argparse.SUPPRESS
            )

    def refuse(self, instead: Mapping[str, str]) -> None:
        """Reject flags of other servers; each value is the remedy in the error, such as `use --x`."""
        self._instead = instead

    @override
    def parse_known_args(  # type: ignore[override]  # argparse's overloads have no common signature
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        argv = list(sys.argv[1:] if args is None else args)
        self._add_negations()
        is_help = not _HELP.isdisjoint(argv)  # an invalid file must not prevent the help
        lower, sources = ([], {}) if is_help else self._lower_layers(argv)
        try:
            parsed, unknown = super().parse_known_args([*lower, *argv], namespace)
        except argparse.ArgumentError as error:
            self.error(self._with_source(error, sources))
        parsed.sources = sources
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

    def settings(self, parsed: argparse.Namespace) -> dict[str, Any]:
        """Return the parsed arguments as the settings of a config file, without those that no layer sets."""
        settings: dict[str, Any] = {}
        dests = parsed.sources.keys() - set(_LAYERS)
        for action in self._actions:
            name, value = _name_of(action), getattr(parsed, action.dest, None)
            if action.dest not in dests or not name or value is None:
                continue
            if isinstance(action, _Ignored):
                settings |= {name: []} if f"--{name}" in value else {}
                continue
            # The first action of a dest is its flag; the others are aliases.
            dests.remove(action.dest)
            settings[name] = value == action.const if action.nargs == 0 else value
        return settings

    def variables(self) -> set[str]:
        """Return the names of the environment variables that set flags."""
        named = (name for action in self._layered_actions() for name in _variables_of(action))
        return {"TANDEM_CONFIG", *named}

    def unknown_flag(self, word: str) -> str:
        """Return the error for an unknown word, with the most similar flag."""
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {name!r}"
        if instead := _REMOVED.get(f"{self.prog} {name}") or _REMOVED.get(name):
            return f"{name} was removed: {instead}"
        if name in self._instead:
            return f"there is no flag {name}: {self._instead[name]}"
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
        self.exit(2, f"{error_prefix(self.prog)}{message}\n")

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
        """Add `--no-x` for each switch `--x`, to override a lower layer."""
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

    def _with_source(self, error: argparse.ArgumentError, sources: Mapping[str, str]) -> str:
        """Return the error's message, with the source of the value in place of the flag."""
        for action in self._actions:
            source = sources.get(action.dest)
            if source and "/".join(action.option_strings) == error.argument_name:
                return f"{source}: {error.message}"
        return str(error)

    def _lower_layers(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the words of environment and file that no higher layer overrides, and the source of each dest that is set.

        The source of a dest on the command line is empty.
        """
        taken = self._dests_in(argv)
        words: list[str] = []
        sources = dict.fromkeys(taken, "")
        for action in self._layered_actions():
            for variable in _variables_of(action):
                # An empty variable is unset: compose files and scripts pass unset variables on as empty ones.
                text = self._environment.get(variable, "")
                is_set = bool(text) and not is_of_kubernetes(variable, text)
                if is_set and action.dest not in taken:
                    taken.add(action.dest)
                    sources[action.dest] = variable
                    value = _value_of_variable(action, text, variable, self)
                    words += self._words_of(action, value, variable)
        path, _ = self._config_path(argv)
        for name, value in self._config_file(argv).items():
            where = f"{path}: {name}"
            flag = "--" + name.replace("_", "-")
            found = self._option_string_actions.get(flag)
            if found is None or found.dest in _LAYERS:
                self.error(f"{where}: {self.unknown_flag(flag)}")
            if found.dest not in taken and value is not None:
                words += self._words_of(found, value, where)
                # An alias may set the same dest as another line.
                earlier = sources.get(found.dest)
                sources[found.dest] = f"{earlier}, {name}" if earlier else where
        return words, sources

    def _layered_actions(self) -> Iterator[argparse.Action]:
        for action in self._actions:
            is_hidden = action.help is argparse.SUPPRESS
            if action.option_strings and action.dest not in _LAYERS and not is_hidden:
                yield action

    def _dests_in(self, words: Sequence[str]) -> set[str]:
        names = (word.partition("=")[0] for word in words if word.startswith("-"))
        actions = (self._option_string_actions.get(name) for name in names)
        return {action.dest for action in actions if action is not None}

    def _config_path(self, argv: Sequence[str]) -> tuple[str, str]:
        """Return the path of the config file, and the flag or variable that sets it."""
        path, source = self._environment.get("TANDEM_CONFIG", ""), "TANDEM_CONFIG"
        for word, following in pairwise([*argv, ""]):
            if word.startswith("--config="):
                path, source = word.partition("=")[2], "--config"
            elif word == "--config":
                path, source = following, "--config"
        return path, source

    def _config_file(self, argv: Sequence[str]) -> dict[str, Any]:
        path, source = self._config_path(argv)
        if not path or not any(self._layered_actions()):  # a command without flags reads no file
            return {}
        try:
            text = Path(path).read_text(encoding="utf-8")
            read = tomllib.loads(text) if path.endswith(".toml") else yaml.safe_load(text)
        except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
            self.error(f"{source} {path}: {error}")
        except yaml.YAMLError as error:
            # Do not quote the line: it may contain a secret.
            mark = getattr(error, "problem_mark", None)
            where = "" if mark is None else f" in line {mark.line + 1}"
            self.error(f"{source} {path}: not YAML{where}: {getattr(error, 'problem', '')}")
        if read is None:
            return {}
        if not isinstance(read, dict) or not all(isinstance(key, str) for key in read):
            self.error(f"{source} {path}: write one flag a line, such as `page-size: 32`")
        return read

    def _words_of(self, action: argparse.Action, value: Any, where: str) -> list[str]:
        """Return the command-line words that set a flag to this value."""
        name = f"--{_name_of(action)}"
        if action.nargs == 0:
            if not isinstance(value, bool):
                self.error(f"{where}: use true or false")
            return [name] if value else []
        if value is False and "off" in (action.choices or ()):
            value = "off"  # YAML reads `off` as False
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, dict) for each in values):
            self.error(f"{where}: use a value or a list")
        if action.nargs in ("+", "*"):
            flat = [str(w) for each in values for w in (each if isinstance(each, list) else [each])]
            return [name, *flat]
        return [f"{name}={each}" for each in values]


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of examples and shows defaults that are not empty."""

    @override
    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_none = action.default is True or action.default in (None, False, [], "")
        if has_none or "(default:" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class _Ignored(argparse.Action):
    """Collects the names of flags that have no effect."""

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
    """Prints the help of every flag and exits."""

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


def _long_names(action: argparse.Action) -> list[str]:
    """Return a flag's long names without dashes, which files and the environment use."""
    return [name.removeprefix("--") for name in action.option_strings if name.startswith("--")]


def _name_of(action: argparse.Action) -> str:
    """Return a flag's first long name without dashes."""
    return next(iter(_long_names(action)), "")


def _variables_of(action: argparse.Action) -> list[str]:
    """Return the variables that set a flag, one for each of its long names, the current name first."""
    return ["TANDEM_" + name.upper().replace("-", "_") for name in _long_names(action)]


def _value_of_variable(action: argparse.Action, text: str, variable: str, parser: Parser) -> Any:
    """Convert the text of a variable to the value of a flag."""
    if action.nargs == 0:
        if text.lower() not in _TRUE | _FALSE:
            parser.error(f"{variable} is {text!r}: use 1 or 0")
        return text.lower() in _TRUE
    is_repeated = isinstance(action.default, list) or action.nargs in ("+", "*")
    try:
        return shlex.split(text) if is_repeated else text
    except ValueError as error:
        parser.error(f"{variable}: {error}")
