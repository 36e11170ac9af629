import argparse

import msgspec
import pytest

from tandem.frontend.options import HttpOptions, TlsFiles, warn_of_exposed_keys, with_files
from tandem.wire.errors import ConfigInvalid
from tandem.wire.options import add_flags, read_flags


def read(*argv: str) -> HttpOptions:
    parser = argparse.ArgumentParser()
    add_flags(parser, HttpOptions)
    return with_files(read_flags(HttpOptions, parser.parse_args(argv)))


def test_without_flags_everyone_may_come_in_by_plain_http():
    assert read() == HttpOptions()
    assert read().scheme == "http"


def test_keys_come_from_flags_and_files_each_once(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\nsk-one\n\n  sk-two  \nsk-zero\n")
    options = read("--api-key", "sk-zero", "--api-key-file", str(file))
    assert options.api_keys == ("sk-zero", "sk-one", "sk-two")
    assert "sk-" not in repr(options)


def test_limits_and_origins_are_read():
    flags = "--max-body-bytes 9 --request-timeout-s 1.5 --cors-allow-origin https://a.example:8443"
    options = read(*flags.split(), "--cors-allow-origin", "*")
    assert (options.max_body_bytes, options.request_timeout_s) == (9, 1.5)
    assert options.cors_origins == ("https://a.example:8443", "*")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--api-key ä", "one word of printable ASCII"),
        ("--api-key-file /nowhere/keys", "--api-key-file /nowhere/keys: No such file"),
        ("--api-key-file /", "--api-key-file /: Is a directory"),
        ("--max-body-bytes 0", "give at least 1"),
        ("--request-timeout-s -1", "give at least 0"),
        ("--request-timeout-s inf", "give at least 0"),
        ("--request-timeout-s nan", "give at least 0"),
        ("--cors-allow-origin a.example", "give https://HOST"),
        ("--cors-allow-origin https://a.example/", "without a path"),
        ("--cors-allow-origin https://a.example:port", "give https://HOST"),
        ("--cors-allow-origin https://user@a.example", "give https://HOST"),
        ("--ssl-keyfile key.pem", "--ssl-keyfile needs --ssl-certfile"),
        ("--ssl-ca-certs ca.pem", "--ssl-ca-certs needs --ssl-certfile"),
        ("--ssl-certfile /nowhere/a.pem", "--ssl-certfile /nowhere/a.pem: No such file"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_give(argv, sentence):
    with pytest.raises(ConfigInvalid, match=sentence):
        read(*argv.split())


@pytest.mark.parametrize("key", ["", "two words", "new\nline"])
def test_a_key_that_no_header_carries_is_refused(key):
    with pytest.raises(ConfigInvalid, match="one word"):
        read("--api-key", key)


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_a_file_without_keys_does_not_open_the_server(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigInvalid, match="holds no key"):
        read("--api-key-file", str(file))


def test_a_file_of_keys_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigInvalid, match="UTF-8"):
        read("--api-key-file", str(file))


@pytest.mark.parametrize(("mode", "is_said"), [(0o644, True), (0o640, False)])
def test_keys_that_all_users_can_read_are_warned_of(tmp_path, capsys, mode, is_said):
    file = tmp_path / "keys"
    file.write_text("sk\n")
    file.chmod(mode)
    warn_of_exposed_keys(read("--api-key-file", str(file)))
    assert ("readable_by_all" in capsys.readouterr().out) == is_said


def test_options_cross_to_another_process():
    options = HttpOptions(api_keys=("k",), tls=TlsFiles("a.pem", "b.pem"))
    assert msgspec.json.decode(msgspec.json.encode(options), type=HttpOptions) == options
