"""HTTP flags and TLS."""

import argparse
import asyncio
import os
import shutil
import ssl
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import openai
import pytest

from tandem.frontend.app import create_app
from tandem.frontend.http.server import listen, serving
from tandem.frontend.options import (
    FrontendOptions,
    HttpOptions,
    TlsFiles,
    check_files,
    read_keys,
    server_context,
    warn_of_exposed_keys,
)
from tandem.settings.flags import SettingInvalid, add_flags, read_flags
from tests.certificates import Certificates, make_certificates
from tests.frontend.conftest import serve_app
from tests.frontend.raw import head
from tests.patience import PATIENCE_S, until_async

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


async def test_tls_client_that_trusts_the_ca_is_served(backend, files):
    async with serve(backend, files, TlsFiles(files.cert, files.key)) as (trusting, url):
        assert await generate(url, trusting) == [5, 6]
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await generate(url, ssl.create_default_context())


async def test_openai_client_streams_over_tls(backend, files):
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


async def test_client_certificate_is_required_with_ca_certs(backend, files):
    async with serve(backend, files, TlsFiles(files.cert, files.key, files.ca)) as (trusting, url):
        with pytest.raises(aiohttp.ClientError):
            await generate(url, trusting)
        files.authority.issue_cert("client.example").configure_cert(trusting)
        assert await generate(url, trusting) == [5, 6]


def has_event(logs, name: str) -> bool:
    return any(entry["event"] == name for entry in logs)


async def served_by(url: str, authority) -> list[int]:
    """Return the answer of a server, to a client that trusts this authority only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    return await generate(url, context)


def replace_file(path: str, new: str) -> None:
    """Replace a file in one step, as operators should."""
    shutil.copy(new, path + ".new")
    os.replace(path + ".new", path)


async def test_renewed_certificate_serves_new_connections_without_a_restart(
    backend, tmp_path, logs
):
    (tmp_path / "old").mkdir(), (tmp_path / "new").mkdir()
    old, new = make_certificates(tmp_path / "old"), make_certificates(tmp_path / "new")
    async with (
        serve(backend, old, TlsFiles(old.cert, old.key)) as (trusting, url),
        aiohttp.ClientSession() as open_client,
    ):
        ask = lambda: open_client.post(f"{url}/generate", json=BODY, ssl=trusting)  # noqa: E731
        assert (await (await ask()).json())["output_ids"] == [5, 6]
        # Between the two steps of a renewal the pair does not match: the old one stays in use.
        replace_file(old.cert, new.cert)
        await until_async(lambda: has_event(logs, "files.not_reloaded"))
        assert await served_by(url, old.authority) == [5, 6]
        replace_file(old.key, new.key)
        await until_async(lambda: has_event(logs, "files.reloaded"))
        assert await served_by(url, new.authority) == [5, 6]
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await served_by(url, old.authority)
        assert (await (await ask()).json())["output_ids"] == [5, 6]


async def test_renewed_authority_of_clients_replaces_the_old_one(backend, tmp_path, logs):
    (tmp_path / "old").mkdir(), (tmp_path / "new").mkdir()
    old, new = make_certificates(tmp_path / "old"), make_certificates(tmp_path / "new")
    async with serve(backend, old, TlsFiles(old.cert, old.key, old.ca)) as (_, url):
        contexts = []
        for each in (old, new):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.authority.configure_trust(context)
            each.authority.issue_cert("client.example").configure_cert(context)
            contexts.append(context)
        assert await generate(url, contexts[0]) == [5, 6]
        with pytest.raises(aiohttp.ClientError):
            await generate(url, contexts[1])
        replace_file(old.ca, new.ca)
        await until_async(lambda: has_event(logs, "files.reloaded"))
        assert await generate(url, contexts[1]) == [5, 6]
        with pytest.raises(aiohttp.ClientError):
            await generate(url, contexts[0])


async def test_keys_are_added_and_revoked_without_a_restart(backend, tmp_path, logs):
    file = tmp_path / "keys"
    file.write_text("leaked\n")
    http = HttpOptions(api_keys=("flag",), key_files=(str(file),))
    async with serve_app(create_app(backend, FrontendOptions(http=http))) as client:

        async def accepted() -> set[str]:
            statuses = {}
            for key in ("flag", "leaked", "new", ""):
                headers = {"Authorization": f"Bearer {key}"}
                async with client.get("/v1/models", headers=headers) as response:
                    statuses[key] = response.status
            return {key for key, status in statuses.items() if status == 200}

        assert await accepted() == {"flag", "leaked"}
        file.write_text("# nothing\n")  # must not open the server to everyone
        await until_async(lambda: has_event(logs, "files.not_reloaded"))
        assert await accepted() == {"flag", "leaked"}
        file.write_text("new\n")
        await until_async(lambda: has_event(logs, "files.reloaded"))
        assert await accepted() == {"flag", "new"}


async def test_plain_http_and_stalled_handshakes_are_closed(backend, files):
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
        ("no_pem", "key", "", "use a certificate and its key"),
        ("cert", "", "", "use a certificate and its key"),
        ("cert", "other_key", "", "--ssl-keyfile .*: is not the key of"),
        ("cert", "no_pem", "", "use a certificate and its key"),
        ("cert", "/nowhere", "", "--ssl-keyfile /nowhere: No such file"),
        ("cert", "key", "no_pem", "--ssl-ca-certs .*: contains no PEM certificates"),
        ("cert", "key", "/nowhere", "--ssl-ca-certs /nowhere: No such file"),
    ],
)
def test_unusable_tls_files_are_named(files, cert, key, ca, sentence):
    with pytest.raises(SettingInvalid, match=sentence):
        server_context(TlsFiles(*(getattr(files, name, name) for name in (cert, key, ca))))


def read(*argv: str) -> HttpOptions:
    parser = argparse.ArgumentParser()
    add_flags(parser, HttpOptions)
    return check_files(read_flags(HttpOptions, parser.parse_args(argv)))


def test_default_is_plain_http_without_keys():
    assert read() == HttpOptions()
    assert read().scheme == "http"


def test_keys_from_flags_and_files_are_deduplicated(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\nsk-one\n\n  sk-two  \nsk-zero\n")
    options = read("--api-key", "sk-zero", "--api-key-file", str(file))
    assert read_keys(options) == ("sk-zero", "sk-one", "sk-two")
    assert "sk-" not in repr(options)


def test_pipe_of_keys_is_rejected_because_it_can_be_read_only_once(tmp_path):
    pipe = tmp_path / "keys"
    os.mkfifo(pipe)
    with pytest.raises(SettingInvalid, match="is a pipe"):
        read("--api-key-file", str(pipe))


def test_limit_and_origin_flags_are_parsed():
    flags = "--max-body-bytes 9 --request-timeout-s 1.5 --cors-allow-origin https://a.example:8443"
    options = read(*flags.split(), "--cors-allow-origin", "*", "--allowed-host", "API.example")
    assert (options.max_body_bytes, options.request_timeout_s) == (9, 1.5)
    assert options.cors_origins == ("https://a.example:8443", "*")
    assert options.allowed_hosts == ("api.example",)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--api-key ä", "printable ASCII characters without spaces"),
        ("--api-key-file /nowhere/keys", "--api-key-file /nowhere/keys: No such file"),
        ("--api-key-file /", "--api-key-file /: Is a directory"),
        ("--max-body-bytes 0", "use at least 1"),
        ("--request-timeout-s -1", "use at least 0"),
        ("--request-timeout-s inf", "use at least 0"),
        ("--request-timeout-s nan", "use at least 0"),
        ("--cors-allow-origin a.example", "use https://HOST"),
        ("--cors-allow-origin https://a.example/", "without a path"),
        ("--cors-allow-origin https://a.example:port", "use https://HOST"),
        ("--cors-allow-origin https://user@a.example", "use https://HOST"),
        ("--ssl-keyfile key.pem", "--ssl-keyfile needs --ssl-certfile"),
        ("--ssl-ca-certs ca.pem", "--ssl-ca-certs needs --ssl-certfile"),
        ("--ssl-certfile /nowhere/a.pem", "--ssl-certfile /nowhere/a.pem: No such file"),
    ],
)
def test_invalid_http_flags_are_rejected_with_a_remedy(argv, sentence):
    with pytest.raises(SettingInvalid, match=sentence):
        read(*argv.split())


@pytest.mark.parametrize("key", ["", "two words", "new\nline"])
def test_key_invalid_in_a_header_is_rejected(key):
    with pytest.raises(SettingInvalid, match="without spaces"):
        read("--api-key", key)


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_empty_key_file_is_rejected(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(SettingInvalid, match="contains no key"):
        read("--api-key-file", str(file))


def test_binary_key_file_is_rejected(tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(SettingInvalid, match="UTF-8"):
        read("--api-key-file", str(file))


@pytest.mark.parametrize(("mode", "is_said"), [(0o644, True), (0o640, False)])
def test_world_readable_key_file_logs_a_warning(tmp_path, capsys, mode, is_said):
    file = tmp_path / "keys"
    file.write_text("sk\n")
    file.chmod(mode)
    warn_of_exposed_keys(read("--api-key-file", str(file)))
    assert ("readable_by_all" in capsys.readouterr().out) == is_said


def test_options_can_be_pickled():
    options = HttpOptions(api_keys=("k",), tls=TlsFiles("a.pem", "b.pem"))
    assert msgspec.json.decode(msgspec.json.encode(options), type=HttpOptions) == options
