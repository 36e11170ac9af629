"""Serve the app with a fake backend on a free port. Prints the URL and serves until it is killed."""

import asyncio
import sys
from pathlib import Path

import uvloop

from tandem.frontend.app import create_app
from tandem.frontend.http.server import listen, serving
from tandem.frontend.text.tokenizer import Tokenizer
from tandem.node.models.checkpoint import resolve_model
from tests.frontend.fakes import FakeBackend


async def main() -> None:
    """Serve the embedded model's tokenizer and answers that repeat the prompt."""
    model = resolve_model(None, Path.home() / ".cache" / "tandem" / "models")
    with listen("127.0.0.1", 0) as sock:
        async with serving(create_app(FakeBackend(Tokenizer.load(model))), sock):
            sys.stdout.write(f"http://127.0.0.1:{sock.getsockname()[1]}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
