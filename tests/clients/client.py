"""Shared code of these scripts: create a client's venv, run the client, print one line with the result."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEFAULT_VENVS = Path(tempfile.gettempdir()) / "tandem-clients"
RUN_TIMEOUT_S = 600
INSTALL_TIMEOUT_S = 1800


class Failed(Exception):
    """A client did not do what was expected. The message describes what happened instead."""


@dataclass(frozen=True)
class Target:
    """The cluster under test and a writable directory.

    Attributes:
        model: As `/v1/models` names it.
        tokenizer: Directory of the model's tokenizer: clients count tokens themselves.
        out: An empty directory.
    """

    url: str
    model: str
    tokenizer: str
    out: Path
    venvs: Path

    def python(self, name: str, *pips: list[str]) -> str:
        """Return the interpreter of a client's venv, which is created with pip if it does not exist."""
        home = self.venvs / name
        python = home / "bin" / "python"
        done = home / "installed"
        if not done.exists():
            print(f"client: {name}: installing into {home}", file=sys.stderr, flush=True)
            venv.create(home, with_pip=True)
            for arguments in pips:
                pip = [str(python), "-m", "pip", "--quiet", *arguments]
                if subprocess.run(pip, timeout=INSTALL_TIMEOUT_S, check=False).returncode:
                    raise Failed(f"pip {' '.join(arguments)} failed")
            done.touch()
        return str(python)

    def run(self, *argv: str, is_offline: bool = True) -> str:
        """Run a client and return its output.

        Args:
            is_offline: Whether it is told that there is no hub to ask.

        Raises:
            Failed: It ended with an error, or not in time.
        """
        env = {**os.environ, "NO_PROXY": "*"} | ({"HF_HUB_OFFLINE": "1"} if is_offline else {})
        try:
            ended = subprocess.run(
                argv,
                env=env,
                cwd=self.out,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=RUN_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"did not end within {RUN_TIMEOUT_S} s") from None
        if ended.returncode:
            raise Failed(f"exit status {ended.returncode}: {ended.stdout[-2000:]}")
        return ended.stdout

    def json(self, name: str) -> dict:
        """Read a client's result file."""
        path = self.out / name
        if not path.exists():
            raise Failed(f"wrote no {name}")
        return json.loads(
            path.read_text().splitlines()[0] if name.endswith("l") else path.read_text()
        )


def version(python: str, distribution: str) -> str:
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise Failed(f"{what}: {found!r} instead of {wanted!r}")


def main(name: str, check: Callable[[Target], tuple[str, str]]) -> None:
    """Run one client and print `client: NAME VERSION ok|FAILED ...`; exits with 0 or 1.

    Args:
        check: Returns the client's version and what was seen; raises `Failed`.
    """
    parser = argparse.ArgumentParser(description=f"Run {name}, unmodified, against a cluster.")
    parser.add_argument("url", metavar="URL", help="of a router, such as http://127.0.0.1:8000")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="of the model it serves")
    parser.add_argument(
        "--venvs",
        type=Path,
        default=DEFAULT_VENVS,
        metavar="DIR",
        help="where the client is installed, once (default: %(default)s)",
    )
    args = parser.parse_args()
    with urllib.request.urlopen(f"{args.url}/v1/models", timeout=10) as response:
        model = json.load(response)["data"][0]["id"]
    with tempfile.TemporaryDirectory() as out:
        target = Target(args.url, model, args.tokenizer, Path(out), args.venvs.absolute())
        try:
            release, seen = check(target)
        except Failed as failed:
            print(f"client: {name} FAILED {failed}", flush=True)
            sys.exit(1)
    print(f"client: {name} {release} ok {seen}", flush=True)
