"""The entry point of `tandem COMMAND ...`."""

import difflib
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from importlib import import_module
from pathlib import Path

from tandem import __version__
from tandem.cli.variables import warn_of_unknown
from tandem.settings.flags import SettingInvalid, error_prefix
from tandem.wire.errors import ConfigInvalid, TandemError

USAGE = """\
usage: tandem COMMAND [FLAGS]

Serve large language models with prefill and decode on separate nodes.

  up        run a cluster on this machine: prefill nodes, decode nodes and a router
  prefill   run a prefill node: compute the KV of prompts and push it to decode nodes
  decode    run a decode node: receive the KV of prompts and generate
  lb        run the router: HTTP, OpenAI API, pairing, detokenization
  adopt     make a node of an unmodified vLLM server, next to it
  serve     run both roles in one engine, without KV transfer
  top       show a running cluster in the terminal: nodes, pages, latencies
  drain     stop a node from accepting requests; finish or hand over the running ones
  doctor    check this machine, or a link between two hosts
  bench     measure latency, throughput and goodput of a server under load
  batch     send a file of requests in OpenAI's batch format; resume after a crash
  operator-key   print the bearer key for administrative requests
  completion   print a script that completes commands and flags in bash, zsh or tcsh

`tandem COMMAND --help` lists a command's flags. Quick start:

  tandem up
  curl -s localhost:8000/generate -H 'Content-Type: application/json' \\
       -d '{"text": "The capital of France is", "max_new_tokens": 32}'

More: docs/quickstart.md
"""

# The cluster's secret, or the path of a file with it: service managers and containers mount secrets as files.
KEY, KEY_FILE = "TANDEM_CLUSTER_KEY", "TANDEM_CLUSTER_KEY_FILE"

# Module of each command, and its function unless it is `main`. It is imported on use only, so `lb` starts without torch.
MODULES = {
    "up": "tandem.cli.up",
    "prefill": "tandem.node.command:prefill",
    "decode": "tandem.node.command:decode",
    "lb": "tandem.router.command",
    "router": "tandem.router.command",
    "adopt": "tandem.stock.command",
    "serve": "tandem.cli.serve",
    "top": "tandem.tools.top",
    "drain": "tandem.cli.drain",
    "doctor": "tandem.tools.doctor.command",
    "bench": "tandem.tools.bench.command",
    "batch": "tandem.tools.batch.command",
    "operator-key": "tandem.cli.operator_key",
    "completion": "tandem.cli.completion",
}

# Commands that no longer exist, and what to do instead.
REMOVED = {
    "docs": "read docs/index.md in the repository, or build the site with `make docs`",
    "plan": "calculate the number of nodes as docs/tuning.md describes",
    "profile": "measure with `tandem bench`, and write the file of --sim-profile as docs/simulation.md describes",
}

# What to install beyond `tandem-serve`, which suffices for the router: `bench` needs numpy, node commands need torch.
PACKAGES = {"bench": "'tandem-serve[bench]'"}
NODE_PACKAGES = "'tandem-serve[cpu]', with a GPU 'tandem-serve[cuda]'"


def read_key_file(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set TANDEM_CLUSTER_KEY, which all commands read, from the file that TANDEM_CLUSTER_KEY_FILE names.

    Raises:
        ConfigInvalid: The file cannot be read or is empty, or both variables are set.
    """
    if not (name := environment.pop(KEY_FILE, "")):
        return
    if environment.get(KEY):
        raise ConfigInvalid(f"{KEY} and {KEY_FILE} are both set: unset one of them")
    try:
        secret = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigInvalid(
            f"the file {name} of {KEY_FILE} cannot be read: {error}; check its path and permissions"
        ) from error
    if not secret:
        raise ConfigInvalid(
            f"the file {name} of {KEY_FILE} is empty: write the output of `openssl rand -hex 32` to it"
        )
    environment[KEY] = secret


def run(argv: Sequence[str]) -> int:
    """Run `tandem` with these arguments; return the exit status.

    An error of the command sets the status: `SettingInvalid` 2, any other `TandemError` 1, `KeyboardInterrupt` 130.
    """
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0
    if name == "--version":
        sys.stdout.write(f"tandem {__version__}\n")
        return 0
    if name not in MODULES:
        sys.stderr.write(f"{error_prefix('tandem')}{_no_command(name)}\n")
        return 2
    try:
        read_key_file()
        warn_of_unknown(f"tandem {name}")
        return _execute(name, rest)
    except (SettingInvalid, TandemError) as error:
        sys.stderr.write(f"{error_prefix(f'tandem {name}')}{error.for_operators}\n")
        return 2 if isinstance(error, SettingInvalid) else 1
    except KeyboardInterrupt:
        sys.stderr.write(f"tandem {name}: stopped\n")
        return 128 + signal.SIGINT


def _no_command(name: str) -> str:
    if name in REMOVED:
        return f"tandem {name} was removed: {REMOVED[name]}"
    near = difflib.get_close_matches(name, MODULES, n=1)
    hint = f"did you mean tandem {near[0]}?" if near else "see tandem --help"
    return f"there is no command {name!r}: {hint}"


def _execute(name: str, argv: Sequence[str]) -> int:
    try:
        module, _, function = MODULES[name].partition(":")
        status: int = getattr(import_module(module), function or "main")(argv)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tandem"):
            raise
        raise ConfigInvalid(
            f"this command needs {error.name}, which is not installed: "
            f"pip install {PACKAGES.get(name, NODE_PACKAGES)}"
        ) from error
    return status


def main() -> int:
    """Run `tandem` with the arguments of this process; return the exit status."""
    return run(sys.argv[1:])
