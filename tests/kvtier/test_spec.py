"""Values of `--kv-tier`, and the errors for invalid URLs."""

import re
import sys

import pytest

from tandem.kvtier.host import HostTier
from tandem.kvtier.redis import parse_url
from tandem.kvtier.spec import make_tier, parse_tier, parse_tiers
from tandem.wire.errors import ConfigInvalid
from tests.kvtier.fakes import SPACE, FakePool


@pytest.mark.parametrize(
    ("text", "limit_bytes"),
    [
        ("host:8GiB", 8 << 30),
        ("host:1.5 GiB", 3 << 29),
        ("host:512mib", 512 << 20),
        ("host:2TB", 2 * 10**12),
        ("host:4096", 4096),
    ],
)
def test_size_units_are_parsed(text, limit_bytes):
    assert parse_tier(text).limit_bytes == limit_bytes


def test_path_may_contain_colons():
    spec = parse_tier("disk:/mnt/a:b:200GiB")
    assert (spec.kind, spec.path, spec.limit_bytes) == ("disk", "/mnt/a:b", 200 << 30)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("host", "is not a size; use one such as"),
        ("host:0", "is not a size"),
        ("host:8XB", "is not a size"),
        ("host:-1", "is not a size"),
        ("disk:/path", "disk:PATH:SIZE"),
        ("disk:/path:large", "is not a size"),
        ("floppy:1MB", "there is no such tier; use host:SIZE"),
        ("redis:6379", "there is no such tier"),
        ("redis://:p@ss/word@h", "whole number"),
        ("floppy://drive", "there is no such tier"),
        ("mooncake://m", "pip install tandem-mooncake"),
        ("", "there is no such tier"),
    ],
)
def test_invalid_tier_is_rejected_with_remedy(text, advice):
    with pytest.raises(ConfigInvalid, match=advice):
        parse_tier(text)


def test_password_is_not_shown():
    spec = parse_tier("redis://user:secret@h:1/2")
    assert "secret" not in repr(spec) + spec.text
    assert "h:1/2" in spec.text
    for url in ("redis://user:secret@", "redis://:se/cret@h", "redis://h?x=secret"):
        with pytest.raises(ConfigInvalid) as refused:
            parse_tier(url)
        assert "cret" not in str(refused.value)
    with pytest.raises(ConfigInvalid) as refused:
        parse_tiers(["redis://user:secret@h"] * 2)
    assert "secret" not in str(refused.value)


def test_tier_names_are_unique():
    specs = parse_tiers(["host:1GiB", "disk:/a:1GiB", "disk:/b:2GiB", "redis://h"])
    assert [spec.name for spec in specs] == ["host", "disk", "disk2", "redis"]


@pytest.mark.parametrize("twice", [["host:1GiB", "host:2GiB"], ["disk:/a:1GiB", "disk:/a:2GiB"]])
def test_repeated_tier_is_rejected(twice):
    with pytest.raises(ConfigInvalid, match="specified twice"):
        parse_tiers(twice)


def test_make_tier_opens_the_specified_tier(tmp_path):
    host = make_tier(parse_tier("host:1MiB"), FakePool(), SPACE)
    assert isinstance(host, HostTier)
    assert host.load().limit_bytes == 1 << 20
    disk = make_tier(parse_tiers(["disk:/x:1MiB", f"disk:{tmp_path}:1MiB"])[1], FakePool(), SPACE)
    assert (disk.name, disk.load().limit_bytes) == ("disk2", 1 << 20)
    disk.close()


def test_missing_store_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tandem.kvtier.redis", None)
    with pytest.raises(ConfigInvalid, match=r"pip install 'tandem-serve\[redis\]'"):
        parse_tier("redis://h")


def test_installed_package_adds_a_tier_for_its_scheme(tmp_path, monkeypatch):
    (tmp_path / "floppy_tier.py").write_text(
        "from tandem.kvtier.host import HostTier\n"
        "def parse_url(url): pass\n"
        "def open_tier(spec, pages, space): return HostTier(pages, 1 << 20, name=spec.name)\n"
    )
    about = tmp_path / "floppy-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: floppy\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[tandem.kv_tiers]\nfloppy = floppy_tier\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = parse_tier("floppy://user:secret@drive/a?b=c")
    assert spec.text == "floppy://drive/a"
    assert make_tier(spec, FakePool(), SPACE).name == "floppy"


@pytest.mark.parametrize(
    ("url", "shown", "options"),
    [
        ("redis://store", "redis://store:6379/0", {"host": "store", "db": 0}),
        ("valkey://store:7000/3", "redis://store:7000/3", {"port": 7000, "db": 3}),
        ("redis://[::1]:7000/", "redis://[::1]:7000/0", {"host": "::1", "port": 7000}),
        ("redis://:p%40ss@store?ttl=60", "redis://store:6379/0", {"password": "p@ss"}),
        (
            "valkeys://me:pw@store/1?ca=/a&cert=/b&key=/c",
            "rediss://store:6379/1",
            {"username": "me", "ssl_ca_certs": "/a", "ssl_certfile": "/b", "ssl_keyfile": "/c"},
        ),
        (
            "unix://me:pw@/run/a%20b?db=2",
            "unix:///run/a%20b?db=2",
            {"path": "/run/a b", "db": 2, "password": "pw"},
        ),
    ],
)
def test_redis_url_sets_connection_options_and_is_shown_without_login(url, shown, options):
    address = parse_url(url)
    assert address.shown == shown
    assert options.items() <= address.options.items()
    assert address.ttl_s == (60 if "ttl" in url else 0)
    assert "pw" not in repr(address)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://", "has no host"),
        ("redis:///0", "has no host"),
        ("redis://:sec/ret@store", "%2F"),
        ("redis://:secret@store:port", "no valid host and port"),
        ("redis://:secret@store/zero", "the database"),
        ("redis://:secret@store/1/2", "the database"),
        ("redis://:secret@store?ttl=1h", "ttl"),
        ("redis://:secret@store?limit=8GiB", "maxmemory"),
        ("redis://:secret@store?timeout=3", "no option 'timeout', only password_file, ttl"),
        ("redis://:secret@store?ca=/a", "no option 'ca'"),
        ("redis://:secret@store?password_file=/a", "use one of them"),
        ("redis://store?password_file=/nobody/has/this", "cannot be read"),
        ("unix://run/redis.sock", "no absolute path"),
    ],
)
def test_invalid_redis_url_is_rejected_without_showing_its_password(url, message):
    with pytest.raises(ConfigInvalid, match=re.escape(message)) as refusal:
        parse_url(url)
    assert "secret" not in refusal.value.message
