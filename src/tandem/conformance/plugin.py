"""The options of the conformance suite. A plugin of its own: `--pyargs` reads no conftest before the command line."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that name what is under test."""
    group = parser.getgroup("tandem.conformance", "the hand-off protocol of Tandem")
    for flag, what in (
        ("--prefill-url", "HTTP address of the prefill node under test"),
        ("--decode-url", "HTTP address of the decode node under test"),
        ("--transport", "transport under test, as package.module:Class"),
    ):
        group.addoption(flag, default="", help=what)
    group.addoption(
        "--one-sided",
        action="store_true",
        help="the owner of the pool sees no write, as with RDMA: leave out what it could refuse",
    )
