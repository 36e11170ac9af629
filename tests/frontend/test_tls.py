import asyncio
import ssl
from contextlib import asynccontextmanager

import aiohttp
import openai
import pytest

from tandem.frontend.app import create_app
from tandem.frontend.options import FrontendOptions, HttpOptions, TlsFiles, server_context
from tandem.frontend.server import listen, serving
from tandem.wire.errors import ConfigInvalid
from tests.certificates import Certificates, make_certificates
from tests.frontend.raw import head
from tests.patience import PATIENCE_S

BODY = {"input_ids": [5, 6], "max_new_tokens": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def serve(backend, files: Certificates, tls: TlsFiles):
    """A server with TLS, a client's context that trusts it, and its address."""
    trusting = ssl.create_default_context()
    files.authority.configure_trust(trusting)
    sock = listen("127.0.0.1", 0)
    app = create_app(backend, FrontendOptions(http=HttpOptions(tls=tls)))
    async with asyncio.timeout(PATIENCE_S), serving(app, sock):
        yield trusting, f"https://127.0.0.1:{sock.getsockname()[1]}"


async def generate(url: str, context: ssl.SSLContext) -> list[int]:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/generate", json=BODY, ssl=context) as response,
    ):
        return (await response.json())["output_ids"]


async def test_a_client_that_trusts_the_authority_is_served(backend, files):
    async with serve(backend, files, TlsFiles(files.cert, files.key)) as (trusting, url):
        assert await generate(url, trusting) == [5, 6]
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await generate(url, ssl.create_default_context())


async def test_the_client_of_openai_streams_over_tls(backend, files):
    async with serve(backend, files, TlsFiles(files.cert, files.key)) as (trusting, url):
        http = openai.DefaultAsyncHttpxClient(verify=trusting)
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="k", http_client=http
        ) as client:
            stream = await client.completions.create(
                model="smol", prompt="one two", max_tokens=3, stream=True
            )
            reasons = [chunk.choices[0].finish_reason async for chunk in stream]
    assert reasons[-1] == "length"


async def test_clients_must_show_a_certificate_where_authorities_are_given(backend, files):
    async with serve(backend, files, TlsFiles(files.cert, files.key, files.ca)) as (trusting, url):
        with pytest.raises(aiohttp.ClientError):
            await generate(url, trusting)
        files.authority.issue_cert("client.example").configure_cert(trusting)
        assert await generate(url, trusting) == [5, 6]


async def test_plain_http_and_half_a_handshake_end_and_others_are_served(backend, files):
    async with serve(backend, files, TlsFiles(files.cert, files.key)) as (trusting, url):
        address = url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head("GET", "/health"))
        _, half = await asyncio.open_connection(*address)
        half.write(b"\x16\x03\x01\x02\x00")
        assert await generate(url, trusting) == [5, 6]
        assert b"HTTP" not in await reader.read()
        half.transport.abort()
        writer.transport.abort()


@pytest.mark.parametrize(
    ("cert", "key", "ca", "sentence"),
    [
        ("no_pem", "key", "", "need a certificate and its key"),
        ("cert", "", "", "need a certificate and its key"),
        ("cert", "other_key", "", "--ssl-keyfile .*: is not the key of"),
        ("cert", "no_pem", "", "need a certificate and its key"),
        ("cert", "/nowhere", "", "--ssl-keyfile /nowhere: No such file"),
        ("cert", "key", "no_pem", "--ssl-ca-certs .*: holds no certificates in PEM"),
        ("cert", "key", "/nowhere", "--ssl-ca-certs /nowhere: No such file"),
    ],
)
def test_files_that_cannot_work_are_named_in_one_sentence(files, cert, key, ca, sentence):
    with pytest.raises(ConfigInvalid, match=sentence):
        server_context(TlsFiles(*(getattr(files, name, name) for name in (cert, key, ca))))
