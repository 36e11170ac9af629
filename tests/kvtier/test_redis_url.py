"""What may be given for a Redis tier."""

import re

import pytest

from tandem.kvtier.redis_url import RedisAddress, parse_redis_url
from tandem.wire.errors import ConfigInvalid


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://store", RedisAddress("tcp", "store")),
        ("valkey://store:7000/3", RedisAddress("tcp", "store", 7000, db=3)),
        ("redis://[::1]:7000/", RedisAddress("tcp", "::1", 7000)),
        ("redis://:p%40ss@store", RedisAddress("tcp", "store", password="p@ss")),
        (
            "redis://me:pw@store?ttl=60",
            RedisAddress("tcp", "store", username="me", password="pw", ttl_s=60),
        ),
        (
            "rediss://store/1?ca=/a&cert=/b&key=/c",
            RedisAddress("tls", "store", db=1, ca="/a", cert="/b", key="/c"),
        ),
        ("unix:///run/redis.sock?db=2", RedisAddress("unix", path="/run/redis.sock", db=2)),
        (
            "unix://me:pw@/run/a%20b",
            RedisAddress("unix", path="/run/a b", username="me", password="pw"),
        ),
    ],
)
def test_urls_say_where_a_server_is(url, address):
    assert parse_redis_url(url) == address


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
def test_what_cannot_be_is_refused_with_what_to_give(url, says):
    with pytest.raises(ConfigInvalid, match=re.escape(says)) as refusal:
        parse_redis_url(url)
    assert "secret" not in refusal.value.message


def test_an_address_is_shown_without_its_password():
    address = parse_redis_url("rediss://me:secret@store:7000/3?ttl=5")
    assert address.shown == "rediss://store:7000/3"
    assert "secret" not in repr(address)
    assert parse_redis_url("unix://:secret@/run/a?db=1").shown == "unix:///run/a?db=1"
    assert parse_redis_url("redis://[::1]").shown == "redis://[::1]:6379/0"
