import pytest

from tandem.router.arguments import parse
from tandem.router.config import AdmissionConfig, Limits
from tandem.wire.errors import ConfigInvalid

NODES = ["--prefill", "http://p:1", "--decode", "http://d:1"]


def test_flags_say_how_many_start_and_who_waits():
    argv = ["--max-in-flight", "7", "--max-queued-requests", "0", "--max-queued-tokens", "5"]
    config = parse([*NODES, *argv, "--max-queue-wait-s", "2.5", "--no-admission"])
    limits = Limits(max_requests=0, max_tokens=5, max_wait_s=2.5)
    assert config.admission == AdmissionConfig(is_on=False, max_in_flight=7, limits=limits)
    assert parse(NODES).admission == AdmissionConfig()


@pytest.mark.parametrize("argv", [["--max-in-flight", "-1"], ["--max-queue-wait-s", "nan"]])
def test_a_limit_that_is_none_is_refused(argv):
    with pytest.raises(ConfigInvalid, match=argv[0]):
        parse([*NODES, *argv])
