import pytest

from tandem.kvtier.host import HostTier
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
