"""One target under atheris, which follows what the code covers: `python -m tests.fuzz.target NAME ...`."""

import sys

import atheris

with atheris.instrument_imports(
    include=[
        "tandem.wire",
        "tandem.kvtransfer",
        "tandem.node",
        "tandem.decode",
        "tandem.prefill",
        "tandem.frontend",
    ]
):
    from tests.fuzz import targets

import logging

import structlog


def _fail(_logger: object, _method: str, event: dict[str, object]) -> str:
    raise AssertionError(event)


def main() -> None:
    """Run the target named first, with libFuzzer's arguments behind it."""
    name = sys.argv.pop(1)
    # An engine's loop survives what it did not foresee, and logs it: that is what is looked for.
    wrapper = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(processors=[_fail], wrapper_class=wrapper)
    with targets.TARGETS[name]() as target:
        if len(sys.argv) > 1 and not sys.argv[-1].startswith("-"):
            targets.write_seeds(name, sys.argv[-1])
        atheris.Setup(sys.argv, target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
