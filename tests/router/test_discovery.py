import socket

import pytest

from tandem.router.config import DnsTarget
from tandem.router.discovery import ABSENCE_BELIEVED_S, DnsSource, resolve
from tandem.router.membership import Member

NO_SUCH_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
NO_SERVER = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
TARGET = DnsTarget("prefill.tandem", 7000, "prefill")


def source_of(*answers, interval_s=0.0) -> DnsSource:
    """A source whose resolver answers so, one after the other."""
    script = iter(answers)

    async def answer(host: str, port: int) -> list[str]:
        assert (host, port) == ("prefill.tandem", 7000)
        given = next(script)
        if isinstance(given, Exception):
            raise given
        return given

    return DnsSource(TARGET, answer, interval_s)


async def test_every_address_of_a_name_is_a_node_of_the_role():
    source = source_of(["10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.1"])
    members = await anext(source.watch())
    assert members == [
        Member(url, "prefill", source=source.name)
        for url in ("http://10.0.0.1:7000", "http://10.0.0.2:7000", "http://[fd00::1]:7000")
    ]


async def test_a_name_that_does_not_resolve_says_so_and_takes_nothing_away():
    source = source_of(["10.0.0.1"], NO_SERVER, TimeoutError(), NO_SUCH_NAME, ["10.0.0.2"])
    watching = source.watch()
    assert len(await anext(watching)) == 1
    # The next that is yielded is what the name has when it is back.
    assert [member.url for member in await anext(watching)] == ["http://10.0.0.2:7000"]
    assert source.problem == ""


async def test_why_a_name_does_not_resolve_can_be_looked_up():
    source = source_of(NO_SERVER)
    with pytest.raises(RuntimeError):  # the script is at its end
        await anext(source.watch())
    assert source.problem == "Temporary failure in name resolution"


async def test_a_name_that_stays_away_is_believed_in_the_end_and_a_dead_name_server_never(
    monkeypatch,
):
    async def no_pause(_seconds):
        pass

    monkeypatch.setattr("tandem.router.discovery.asyncio.sleep", no_pause)
    num_asked = int(ABSENCE_BELIEVED_S / 2.0)
    lost = [NO_SERVER] * 10 * num_asked
    source = source_of(["10.0.0.1"], *lost, ["10.0.0.1"], interval_s=2.0)
    watching = source.watch()
    assert [len(await anext(watching)) for _ in range(2)] == [1, 1]
    gone = [NO_SUCH_NAME] * (num_asked + 1)
    watching = source_of(["10.0.0.1"], *gone, interval_s=2.0).watch()
    assert [len(await anext(watching)) for _ in range(2)] == [1, 0]


async def test_the_loops_resolver_is_asked():
    assert "127.0.0.1" in await resolve("localhost", 7000)
