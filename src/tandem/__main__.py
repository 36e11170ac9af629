"""The entry point of `tandem COMMAND ...`."""

import difflib
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from importlib import import_module
from pathlib import Path

from tandem.telemetry.version import package_version
from tandem.wire.errors import ConfigInvalid, TandemError

USAGE = """\
usage: tandem COMMAND [FLAGS]

Serve large language models with prefill and decode on separate nodes.

  up        a whole cluster on this machine: prefills, decodes and the router in one command
  prefill   a prefill node: computes the KV of prompts and pushes it to decode nodes
  decode    a decode node: takes over prompts whose KV landed, and generates
  lb        the router: HTTP, OpenAI API, pairing, detokenizing
  serve     both roles in one engine, without transfer
  top       what a cluster does now, in a terminal: nodes, pages, pairs, latencies
  drain     have a node finish, or hand over, what it has, and take nothing new
  doctor    check this machine, a link between two hosts, or running nodes
  bench     drive a server with a load: latencies, throughput, goodput
  batch     send a file of requests in OpenAI's batch format; resumes after a crash
  profile   measure one node's forwards, for `plan` and for simulated engines
  plan      how many nodes of which kind a load and its latencies take, at the least cost
  operator-key   print the key that requests which change the cluster bear
  completion   print the script that completes commands and flags in bash, zsh or tcsh
  docs      the documentation: `tandem docs` lists topics, `tandem docs TOPIC` shows one

`tandem COMMAND --help` lists a command's flags. A first try:

  tandem up
  curl -s localhost:8000/generate -H 'Content-Type: application/json' \\
       -d '{"text": "The capital of France is", "max_new_tokens": 32}'

More: tandem docs quickstart
"""

# The cluster's secret, or the file that holds it: service managers and containers mount secrets as files.
KEY, KEY_FILE = "TANDEM_CLUSTER_KEY", "TANDEM_CLUSTER_KEY_FILE"

# The module with each command's `main`. It is imported only on use, so `lb` starts without torch.
MODULES = {
    "up": "tandem.up",
    "prefill": "tandem.prefill.command",
    "decode": "tandem.decode.command",
    "lb": "tandem.router.command",
    "router": "tandem.router.command",
    "serve": "tandem.serve",
    "top": "tandem.top.command",
    "drain": "tandem.drain",
    "doctor": "tandem.doctor.command",
    "bench": "tandem.bench.command",
    "batch": "tandem.batch.command",
    "profile": "tandem.profile.command",
    "plan": "tandem.plan.command",
    "operator-key": "tandem.operator_key",
    "completion": "tandem.parsers",
    "docs": "tandem.manual.command",
}

# What a plain install, which is the router's, lacks: `bench` needs numpy, the commands of nodes need torch and more.
EXTRAS = {"bench": "bench"}
NODE_EXTRA = "cpu]', with a GPU 'tandem-serve[cuda"


def take_key_file(environment: MutableMapping[str, str] = os.environ) -> None:
    """Read the file that TANDEM_CLUSTER_KEY_FILE names into TANDEM_CLUSTER_KEY, which all commands read.

    Raises:
        ConfigInvalid: The file cannot be read or is empty, or both variables are set.
    """
    if not (name := environment.pop(KEY_FILE, "")):
        return
    if environment.get(KEY):
        raise ConfigInvalid(f"{KEY} and {KEY_FILE} are both set: leave one of them out")
    try:
        secret = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigInvalid(f"{KEY_FILE} is {name}, which cannot be read: {error}") from error
    if not secret:
        raise ConfigInvalid(
            f"{KEY_FILE} is {name}, which is empty: fill it with `openssl rand -hex 32`"
        )
    environment[KEY] = secret


def run(argv: Sequence[str]) -> int:
    """Run `tandem` with these arguments; return the exit status.

    A command's errors become the status: `ConfigInvalid` 2, another `TandemError` 1, `KeyboardInterrupt` 130.
    """
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0
    if name == "--version":
        sys.stdout.write(f"tandem {package_version()}\n")
        return 0
    if name not in MODULES:
        near = difflib.get_close_matches(name, MODULES, n=1)
        hint = f"did you mean tandem {near[0]}?" if near else "see tandem --help"
        sys.stderr.write(f"tandem: error: there is no command {name!r}: {hint}\n")
        return 2
    try:
        take_key_file()
        return _execute(name, rest)
    except TandemError as error:
        sys.stderr.write(f"tandem {name}: error: {error.for_operators}\n")
        return 2 if isinstance(error, ConfigInvalid) else 1
    except KeyboardInterrupt:
        sys.stderr.write(f"tandem {name}: stopped\n")
        return 128 + signal.SIGINT


def _execute(name: str, argv: Sequence[str]) -> int:
    try:
        status: int = import_module(MODULES[name]).main(argv)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tandem"):
            raise
        raise ConfigInvalid(
            f"{error.name} is not installed, which this command needs: "
            f"pip install 'tandem-serve[{EXTRAS.get(name, NODE_EXTRA)}]'"
        ) from error
    return status


def main() -> int:
    """Run `tandem` with the arguments of this process; return the exit status."""
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
