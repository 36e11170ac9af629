"""A decode pool in a separate process, for tests that kill or stop it or its writer.

`far_end listen NAME` prints its offer and permits page 0 ... 7 to room 1.
`far_end write NAME` reads an offer and writes to it for ever, page after page.
"""

import os
import sys

import msgspec
import numpy as np

from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import PagedTokens, plan_copies
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer
from tests.kvtransfer.makers import make

LAYOUT = KVLayout(
    num_pages=8, page_size=16, num_layers=4, num_kv_heads=8, head_dim=64, dtype="f", itemsize=64
)


def whole_pool():
    everything = PagedTokens(LAYOUT, range(8))
    return plan_copies(everything, everything, range(8 * 16))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(what: str, name: str) -> None:
    region = MemoryRegion.shared(LAYOUT.pool_bytes, "farend")
    transport = make(name)
    if what == "listen":
        listener = transport.listen(Pool.packed(region, LAYOUT.page_bytes, 8))
        admission = listener.admit("127.0.0.1")
        listener.permit(admission.peer, Room(1), range(8))
        say(msgspec.json.encode(admission.offer).decode())
        sys.stdin.read()
        os._exit(0)
    offer = msgspec.json.decode(sys.stdin.readline(), type=TransportOffer)
    region.array()[:] = np.arange(LAYOUT.pool_bytes, dtype=np.uint8)
    connection = transport.connect(offer, region)
    while True:
        connection.write(Room(1), whole_pool())
        say("written")


if __name__ == "__main__":
    main(*sys.argv[1:])
