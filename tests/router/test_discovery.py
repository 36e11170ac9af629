"""The source of nodes that resolves DNS names."""

import socket

import pytest

from tandem.router.config import DnsTarget
from tandem.router.membership.membership import Member, SourceFailed
from tandem.router.membership.sources import MAX_ABSENCES, DnsSource, resolve

NO_SUCH_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
NO_SERVER = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def source_of(*answers) -> DnsSource:
    """A source whose resolver answers so, one after the other."""
    script = iter(answers)

    async def answer(host: str, port: int) -> list[str]:
        assert (host, port) == ("prefill.tandem", 7000)
        given = next(script)
        if isinstance(given, Exception):
            raise given
        return given

    return DnsSource(DnsTarget("prefill.tandem", 7000, "prefill"), answer)


async def test_each_address_of_a_name_becomes_a_node_with_the_role():
    source = source_of(["10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.1"])
    assert await source.find() == [
        Member(url, "prefill", source=source.name)
        for url in ("http://10.0.0.1:7000", "http://10.0.0.2:7000", "http://[fd00::1]:7000")
    ]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (NO_SERVER, "Temporary failure in name resolution"),
        (NO_SUCH_NAME, "Name or service not known"),
        (TimeoutError(), "does not answer in time"),
    ],
)
async def test_unresolvable_name_fails_with_the_reason(error, sentence):
    source = source_of(error, ["10.0.0.1"])
    with pytest.raises(SourceFailed, match=sentence):
        await source.find()
    assert len(await source.find()) == 1


async def test_nodes_are_removed_only_after_repeated_name_not_found_answers():
    for error, is_believed in ((NO_SUCH_NAME, True), (NO_SERVER, False)):
        source = source_of(*[error] * (MAX_ABSENCES + 1))
        for _ in range(MAX_ABSENCES):
            with pytest.raises(SourceFailed):
                await source.find()
        if is_believed:
            assert await source.find() == []
        else:
            with pytest.raises(SourceFailed):
                await source.find()


async def test_dns_source_uses_the_resolver_of_the_event_loop():
    assert "127.0.0.1" in await resolve("localhost", 7000)
