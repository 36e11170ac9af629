"""From the command line of `tandem doctor` to its exit status."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from rich.console import Console

from tandem.doctor.arguments import parse
from tandem.doctor.examination import examine
from tandem.doctor.render import make_console, render
from tandem.telemetry.log import configure
from tandem.wire.errors import ConfigInvalid

STOPPED = 130  # what shells say of a command that Ctrl-C ended


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    # What runs in other processes is ended by those who started it, on SIGTERM too.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    configure("error")
    try:
        config = parse(argv)
        with _progress() as progress:
            report = examine(config, progress)
    except ConfigInvalid as error:
        sys.stderr.write(f"tandem doctor: error: {error.for_operators}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("tandem doctor: stopped\n")
        return STOPPED
    if config.is_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        render(report, make_console())
    return 0 if report.is_well else 1


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Give what shows the step under way: on a terminal only, and never on standard output."""
    console = Console(stderr=True, markup=False)
    if not console.is_terminal:
        yield lambda _step: None
        return
    with console.status("") as status:
        yield lambda step: status.update(f"{step} …")
