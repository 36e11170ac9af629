"""Warns of `TANDEM_*` variables that no command reads, such as a misspelt `TANDEM_PAGESIZE`."""

import difflib
import os
import sys
from collections.abc import Iterable, MutableMapping

from tandem.settings.parser import Parser, is_of_kubernetes

PREFIX = "TANDEM_"
# Variables that set no flag: the secret, the flags of the systemd units, and the URL of the image's health check.
OTHERS = {"TANDEM_CLUSTER_KEY", "TANDEM_CLUSTER_KEY_FILE", "TANDEM_FLAGS", "TANDEM_HEALTH_URL"}


def warn_of_unknown(prog: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Write a line to standard error for each `TANDEM_*` variable that no command reads.

    A variable of a different command is known, because all processes of a cluster may share an environment. Unknown
    variables are removed, so that the child processes of this command do not repeat the warning.
    """
    names = {
        name
        for name, value in environment.items()
        if name.startswith(PREFIX) and not is_of_kubernetes(name, value)
    }
    if names <= OTHERS:
        return
    known = OTHERS.union(*(parser.variables() for parser in _parsers()))
    nearby = {each.removeprefix(PREFIX): each for each in sorted(known)}
    for name in sorted(names - known):
        del environment[name]
        near = difflib.get_close_matches(name.removeprefix(PREFIX), nearby, n=1)
        hint = f"did you mean {nearby[near[0]]}?" if near else "see docs/configuration.md"
        sys.stderr.write(f"{prog}: warning: no command here reads the variable {name}: {hint}\n")


def _parsers() -> Iterable[Parser]:
    """Return the parsers of all installed commands. Imported late: that takes longer than a command's own modules."""
    try:
        from tandem.cli.completion import parsers
    except ModuleNotFoundError:  # a plain install, without the packages of nodes
        from tandem.router.arguments import build_parser

        return [build_parser()]
    return parsers().values()
