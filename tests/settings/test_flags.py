"""Config fields as flags."""

import argparse
from functools import partial
from typing import Annotated, Literal

import msgspec
import pytest

from tandem.settings.flags import Flag, SettingInvalid, add_flags, options_of, read_flags
from tandem.wire.hosts import bare_host


class Link(msgspec.Struct, frozen=True, kw_only=True):
    port: Annotated[int, Flag("--link-port", group="link", ge=0, le=65535, help="a port")] = 8998
    secret: str = "never a flag"


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    cert: Annotated[str, Flag("--cert", help="a file")] = ""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    page_size: Annotated[
        int, Flag("--page-size", "--block-size", group="pool", ge=1, help="tokens")
    ] = 16
    wait_s: Annotated[float, Flag("--wait-ms", scale=0.001, ge=1, help="ms")] = 0.5
    staging: Annotated[int, Flag("--staging-mib", scale=1 << 20, ge=1, help="MiB")] = 2 << 20
    kind: Annotated[Literal["a", "b"], Flag("--kind", help="a or b", synonyms={"beta": "b"})] = "a"
    is_cached: Annotated[bool, Flag("--no-cache", help="cache nothing")] = True
    is_fast: Annotated[bool, Flag("--fast", help="hurry")] = False
    name: Annotated[str, Flag("--name", help="a name", parse=partial(bare_host, "--name"))] = ""
    host: Annotated[
        str, Flag("--listen", help="an address", parse=partial(bare_host, "--host"))
    ] = "127.0.0.1"
    urls: Annotated[
        tuple[str, ...],
        Flag("--url", help="a URL", aliases={"--host": lambda name: f"http://{name}"}),
    ] = ()
    link: Link = Link()
    tls: Tls | None = None


def read(*argv, **options) -> Config:
    parser = argparse.ArgumentParser()
    add_flags(parser, Config, **options)
    return read_flags(Config, parser.parse_args(argv), role="prefill")


def test_config_without_flags_has_its_defaults():
    assert read() == Config(role="prefill")


def test_each_flag_sets_its_field():
    argv = [
        "--block-size",
        "32",
        "--wait-ms",
        "20",
        "--staging-mib",
        "3",
        "--kind",
        "beta",
        "--no-cache",
        "--fast",
    ]
    urls = ["--url", "http://a", "--host", "b"]
    assert read(*argv, *urls, "--link-port", "1", "--cert", "c.pem") == Config(
        role="prefill",
        page_size=32,
        wait_s=0.02,
        staging=3 << 20,
        kind="b",
        is_cached=False,
        is_fast=True,
        urls=("http://a", "http://b"),
        link=Link(port=1),
        tls=Tls(cert="c.pem"),
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--page-size 0", "--page-size/--block-size is 0: use at least 1"),
        ("--wait-ms nan", "--wait-ms is nan: use at least 1"),
        ("--wait-ms inf", "--wait-ms is inf: use at least 1"),
        ("--link-port 65536", "--link-port is 65536: use 0 to 65535"),
    ],
)
def test_value_out_of_bounds_is_rejected_naming_the_flag(argv, sentence):
    with pytest.raises(SettingInvalid, match=sentence):
        read(*argv.split())


def test_empty_value_is_checked_unless_it_is_the_default():
    assert read("--name", "").name == ""
    with pytest.raises(SettingInvalid, match="--host  is not a host: use an address"):
        read("--listen", "")


def test_command_may_change_defaults_and_leave_out_flags():
    assert read(defaults={"page_size": 64}).page_size == 64
    with pytest.raises(SystemExit):
        read("--link-port", "1", without=("link",))
    with pytest.raises(SystemExit):
        read("--fast", only={"page_size"})


def test_flag_names_are_unique():
    names = [name for option in options_of(Config) for name in option.flag.names]
    assert len(names) == len(set(names)) == 12
