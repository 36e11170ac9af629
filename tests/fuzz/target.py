"""One target under atheris, which follows what the code covers: `python -m tests.fuzz.target NAME ...`."""

import sys

import atheris

with atheris.instrument_imports(
    include=["wire", "kvtransfer", "node", "decode", "prefill", "frontend"]
):
    from tests.fuzz import targets

import logging

import structlog


def main() -> None:
    """Run the target named first, with libFuzzer's arguments behind it."""
    name = sys.argv.pop(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with targets.TARGETS[name]() as target:
        if len(sys.argv) > 1 and not sys.argv[-1].startswith("-"):
            targets.write_seeds(name, sys.argv[-1])
        atheris.Setup(sys.argv, target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
