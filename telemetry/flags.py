"""The flags that every serving command has."""

import argparse


def add_level_flag(parser: argparse._ActionsContainer) -> None:
    """Add `--log-level`."""
    parser.add_argument(
        "--log-level",
        type=str.lower,
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="lowest level that is written (default: %(default)s)",
    )


def add_format_flag(parser: argparse._ActionsContainer) -> None:
    """Add `--log-format`."""
    parser.add_argument(
        "--log-format",
        choices=["auto", "console", "json"],
        default="auto",
        help="auto: console on a terminal, else JSON lines (default: %(default)s)",
    )


def add_heartbeat_flag(parser: argparse._ActionsContainer) -> None:
    """Add `--heartbeat-interval-ms`."""
    parser.add_argument(
        "--heartbeat-interval-ms",
        type=float,
        default=500.0,
        metavar="MS",
        help="between two signs of life on links between processes, the same everywhere; a lost one is "
        "noticed within four (default: 500)",
    )
