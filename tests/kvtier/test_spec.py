"""What may be given as `--kv-tier`, and how wrong URLs are refused."""

import re

import pytest

from tandem.kvtier.host import HostTier
from tandem.kvtier.spec import make_tier, parse_tier, parse_tiers
from tandem.kvtier.store_url import MooncakeAddress, parse_mooncake_url, parse_redis_url
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
def test_a_size_is_read_as_people_write_it(text, limit_bytes):
    assert parse_tier(text).limit_bytes == limit_bytes


def test_a_path_may_have_colons():
    spec = parse_tier("disk:/mnt/a:b:200GiB")
    assert (spec.kind, spec.path, spec.limit_bytes) == ("disk", "/mnt/a:b", 200 << 30)


@pytest.mark.parametrize(
    "url",
    ["redis://u:p@h:1/2", "rediss://h", "valkey://[::1]:7/0", "unix:///run/redis.sock?db=1"],
)
def test_urls_of_stores_are_kept_as_they_are(url):
    spec = parse_tier(url)
    assert (spec.kind, spec.url) == ("redis", url)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("host", "no size; give one such as"),
        ("host:0", "no size"),
        ("host:8XB", "no size"),
        ("host:-1", "no size"),
        ("disk:/path", "disk:PATH:SIZE"),
        ("disk:/path:large", "no size"),
        ("floppy:1MB", "there is no such tier; give host:SIZE"),
        ("redis:6379", "there is no such tier"),
        ("redis://", "names no host"),
        ("redis://:p@ss/word@h", "whole number"),
        ("redis://h?limit=1", "maxmemory"),
        ("mooncake://", "give a master"),
        ("redis://h:port/0", "no valid host and port"),
        ("unix://", "whole path"),
        ("", "there is no such tier"),
    ],
)
def test_what_is_no_tier_is_refused_with_what_to_give(text, advice):
    with pytest.raises(ConfigInvalid, match=advice):
        parse_tier(text)


def test_no_password_is_shown():
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


def test_each_tier_has_a_name_of_its_own():
    specs = parse_tiers(["host:1GiB", "disk:/a:1GiB", "disk:/b:2GiB", "redis://h"])
    assert [spec.name for spec in specs] == ["host", "disk", "disk2", "redis"]


@pytest.mark.parametrize("twice", [["host:1GiB", "host:2GiB"], ["disk:/a:1GiB", "disk:/a:2GiB"]])
def test_a_tier_is_given_once(twice):
    with pytest.raises(ConfigInvalid, match="there already"):
        parse_tiers(twice)


def test_a_tier_is_made_of_what_was_given(tmp_path):
    host = make_tier(parse_tier("host:1MiB"), FakePool(), SPACE)
    assert isinstance(host, HostTier)
    assert host.load().limit_bytes == 1 << 20
    disk = make_tier(parse_tiers(["disk:/x:1MiB", f"disk:{tmp_path}:1MiB"])[1], FakePool(), SPACE)
    assert (disk.name, disk.load().limit_bytes) == ("disk2", 1 << 20)
    disk.close()


def test_a_store_without_its_package_names_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'redis'")

    monkeypatch.setattr("tandem.kvtier.spec.import_module", missing)
    with pytest.raises(ConfigInvalid, match=r"pip install 'tandem-serve\[redis\]'"):
        make_tier(parse_tier("redis://h"), FakePool(), SPACE)


@pytest.mark.parametrize(
    ("url", "shown", "clean", "options"),
    [
        ("redis://store", "redis://store:6379/0", "redis://store", {}),
        ("valkey://store:7000/3", "redis://store:7000/3", "redis://store:7000/3", {}),
        ("redis://[::1]:7000/", "redis://[::1]:7000/0", "redis://[::1]:7000/", {}),
        ("redis://:p%40ss@store?ttl=60", "redis://store:6379/0", "redis://:p%40ss@store", {}),
        (
            "valkeys://me:pw@store/1?ca=/a&cert=/b&key=/c",
            "rediss://store:6379/1",
            "rediss://me:pw@store/1",
            {"ssl_ca_certs": "/a", "ssl_certfile": "/b", "ssl_keyfile": "/c"},
        ),
        (
            "unix://me:pw@/run/a%20b?db=2",
            "unix:///run/a b?db=2",
            "unix://me:pw@/run/a%20b?db=2",
            {},
        ),
    ],
)
def test_a_redis_url_is_handed_on_without_our_options_and_shown_without_a_login(
    url, shown, clean, options
):
    address = parse_redis_url(url)
    assert (address.shown, address.url, address.options) == (shown, clean, options)
    assert address.ttl_s == (60 if "ttl" in url else 0)
    assert "pw" not in repr(address)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://store", "no store that Redis speaks"),
        ("redis://", "names no host"),
        ("redis:///0", "names no host"),
        ("redis://:sec/ret@store", "%2F"),
        ("redis://:secret@store:port", "no valid host and port"),
        ("redis://:secret@store/zero", "the database"),
        ("redis://:secret@store/1/2", "the database"),
        ("redis://:secret@store?ttl=1h", "ttl"),
        ("redis://:secret@store?limit=8GiB", "maxmemory"),
        ("redis://:secret@store?timeout=3", "no option 'timeout'; there are password_file, ttl"),
        ("redis://:secret@store?ca=/a", "no option 'ca'"),
        ("redis://:secret@store?password_file=/a", "not both"),
        ("redis://store?password_file=/nobody/has/this", "cannot be read"),
        ("unix://run/redis.sock", "whole path"),
    ],
)
def test_a_wrong_redis_url_is_refused_with_what_to_give_and_without_its_password(url, says):
    with pytest.raises(ConfigInvalid, match=re.escape(says)) as refusal:
        parse_redis_url(url)
    assert "secret" not in refusal.value.message


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("mooncake://master", MooncakeAddress("master", 50051)),
        ("mooncake://[::1]:7000/?segment=512MiB", MooncakeAddress("::1", 7000, 512 << 20)),
        (
            "mooncake://m:1?segment=2GiB&host=me&metadata=http://a/b&protocol=rdma&devices=mlx5_0",
            MooncakeAddress("m", 1, 2 << 30, "me", "http://a/b", "rdma", "mlx5_0"),
        ),
    ],
)
def test_a_mooncake_url_names_a_store_and_what_is_lent(url, address):
    assert parse_mooncake_url(url) == address


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mooncake://", "give a master"),
        ("mooncake://m:x", "no valid host and port"),
        ("mooncake://m/1", "give a master"),
        ("mooncake://m?segment=much", "512MiB"),
        ("mooncake://m?size=1GiB", "no option 'size'"),
        ("mooncake://m?protocol=ucx", "tcp or rdma"),
    ],
)
def test_a_wrong_mooncake_url_is_refused_with_what_to_give(url, says):
    with pytest.raises(ConfigInvalid, match=re.escape(says)):
        parse_mooncake_url(url)
