from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from tandem.frontend.app import create_app
from tandem.frontend.http.server import listen, serving
from tandem.frontend.options import FrontendOptions
from tandem.frontend.text.tokenizer import Tokenizer
from tests.frontend.fakes import FakeBackend
from tests.loop_watch import no_callback_holds_up_the_loop

__all__ = ["no_callback_holds_up_the_loop"]


@pytest.fixture(scope="session")
def tokenizer_dir(embedded_model) -> Path:
    """A directory with SmolLM2's tokenizer files, written by transformers."""
    return embedded_model


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture
def backend(tokenizer) -> FakeBackend:
    return FakeBackend(tokenizer)


@asynccontextmanager
async def serve(backend: FakeBackend, options: FrontendOptions | None = None):
    """Start a real server on a free port and return a client with its base URL."""
    async with serve_app(create_app(backend, options)) as client:
        yield client


@asynccontextmanager
async def serve_app(app: web.Application):
    """Like `serve`, for an existing app."""
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with serving(app, sock), aiohttp.ClientSession(url) as client:
        yield client


@pytest.fixture
def logs():
    """Captured log events."""
    with capture_logs() as entries:
        yield entries


@pytest.fixture
async def client(backend):
    async with serve(backend) as session:
        yield session


@pytest.fixture
async def sdk(client):
    """OpenAI's client library."""
    base = str(client._base_url / "v1")
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as made:
        yield made
