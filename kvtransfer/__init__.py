"""Moves pages of KV between two processes' memories.

```
 sender.py    prefill's end   ┐ both run session.py (who may do what, when) over wire.channel, in a
 receiver.py  decode's end    ┘ control thread of their own (control.py)
 bootstrap.py, prefill_links.py   the links of each end     push_room.py  what prefill pushes, and where
 events.py    what the role receives of a room              group.py      the agents of all ranks, as one
 plan.py      pages and tokens → contiguous copies          region.py     memory both ends can name
 checksum.py  which bytes are hashed                        layout.py     the shape of a page
 transports/  contiguous copies → bytes in the far pool     sharding.py   which rank holds which heads
```

It is given a `KVLayout` and a `MemoryRegion`; it knows no model and no tensor.
"""
