"""What outcomes mean for those who asked."""

import pytest

from tandem.doctor.judging import judge, link_limits
from tandem.doctor.measuring import Outcome
from tandem.doctor.probe import Measured, Unusable, Where, make_transport
from tandem.doctor.report import LinkLimits
from tandem.kvtransfer.transports import registry

LIMITS = LinkLimits(memcpy_gigabytes_per_s=10, socket_gigabytes_per_s=2, rdma_gigabytes_per_s=None)
AUTO = ("shm", "tcp")


def works(name: str, gigabytes_per_s: float) -> Outcome:
    measured = Measured(
        bytes_per_s=gigabytes_per_s * 1e9, latency_us=40, num_copies=1, digest="", round_trip_us=20
    )
    return Outcome(name, "works", measured)


def refused(name: str) -> Outcome:
    return Outcome(name, "refused", reason="another host")


def statuses(*outcomes: Outcome, wanted=()) -> list[str]:
    return [row.status for row in judge(outcomes, LIMITS, wanted, AUTO)]


def test_each_is_held_against_the_limit_of_its_kind():
    outcomes = [works("shm", 9), works("tcp", 3), works("file", 1), works("nixl", 4)]
    shm, tcp, file, nixl = judge(outcomes, LIMITS, (), AUTO)
    assert (shm.limit, shm.of_limit) == ("memcpy", pytest.approx(0.9))
    assert (tcp.limit, tcp.of_limit) == ("socket", pytest.approx(1.5))
    assert (file.limit, file.of_limit) == ("", None)
    assert nixl.limit == "socket"
    fast = LinkLimits(socket_gigabytes_per_s=2, rdma_gigabytes_per_s=50)
    [nixl] = judge([works("nixl", 45)], fast, (), AUTO)
    assert (nixl.limit, nixl.status) == ("rdma", "ok")


def test_less_than_half_of_the_limit_is_a_warning_that_says_where_to_look():
    [row] = judge([works("shm", 4)], LIMITS, (), AUTO)
    assert row.status == "warning"
    assert "less than half" in row.advice


def test_without_a_name_one_that_works_is_enough():
    assert statuses(refused("shm"), works("tcp", 2)) == ["missing", "ok"]
    assert statuses(refused("shm"), refused("tcp"), refused("nixl")) == [
        *("failed", "failed", "missing")
    ]


def test_what_auto_would_take_may_not_break():
    broken = Outcome("shm", "broke", reason="other bytes")
    assert statuses(broken, works("tcp", 2)) == ["failed", "ok"]
    assert statuses(Outcome("ucx", "broke", reason="x"), works("tcp", 2)) == ["warning", "ok"]


def test_what_was_named_has_to_work():
    missing = Outcome("nixl", "no_library", reason="no library")
    assert statuses(missing, works("tcp", 2), wanted=("nixl",)) == ["failed", "ok"]
    assert statuses(missing, works("tcp", 2)) == ["missing", "ok"]


def test_a_bare_stream_that_could_not_be_opened_leaves_no_limit():
    limits = link_limits(works("memcpy", 10), refused("socket"), 0.0)
    assert limits.socket_gigabytes_per_s is None
    [row] = judge([works("tcp", 2)], limits, (), AUTO)
    assert (row.status, row.of_limit) == ("ok", None)


def test_a_missing_library_is_shown_with_the_line_that_brings_it(monkeypatch):
    monkeypatch.setitem(registry.BUILT_IN, "fabric", "tandem.kvtransfer.transports.absent:Absent")
    with pytest.raises(Unusable) as unusable:
        make_transport("fabric", Where(host="127.0.0.1"))
    answer = unusable.value.answer
    assert answer.stage == "library"
    [row] = judge([Outcome("fabric", "no_library", reason=answer.reason)], LIMITS, (), AUTO)
    assert row.advice.startswith("needs a library that is not here")
    assert "pip install 'tandem-serve[fabric]'" in row.advice
