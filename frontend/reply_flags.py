"""The flags that say how a model writes its calls of tools and its thoughts."""

import argparse

from tandem.frontend.reply_formats import REASONING_FORMATS, TOOL_FORMATS


def add_reply_flags(group: argparse._ActionsContainer) -> None:
    """Add `--tool-call-parser` and `--reasoning-parser`; their names are checked by `reply_formats`."""
    group.add_argument(
        "--tool-call-parser",
        default="",
        metavar="NAME",
        help="tell calls of tools apart from what a chat says; the format the model writes them in: "
        f"{', '.join(sorted(TOOL_FORMATS))} (default: calls stay text, unless tool_choice forces one)",
    )
    group.add_argument(
        "--reasoning-parser",
        default="",
        metavar="NAME",
        help="tell thoughts apart, as reasoning_content; the format the model writes them in: "
        f"{', '.join(sorted(REASONING_FORMATS))} (default: thoughts stay in the content)",
    )
