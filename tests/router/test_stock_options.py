"""Options of engines that do not implement the node protocol."""

import pytest

from tandem.router.stock_options import StockOptions


@pytest.mark.parametrize(
    ("given", "host", "used"),
    [
        ("tcp://*:5557", "d1", "tcp://d1:5557"),
        ("tcp://*:5557", "fd00::1", "tcp://[fd00::1]:5557"),
        ("tcp://events:5557", "d1", "tcp://events:5557"),
        ("", "d1", ""),
    ],
)
def test_star_is_the_host_of_the_engine(given, host, used):
    assert StockOptions(kv_events_endpoint=given).events_of(host) == (used, "")
