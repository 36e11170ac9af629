"""Moves pages of KV from one process's memory to another's.

```
 session.py        states of a room, for each end       link_session.py   states of a link, for each end
 events.py         events of a room for the role        plan.py           pages and tokens → copies
 layout.py         the shape of a page                  sharding.py       the heads of each rank
 region.py         the memory of a pool                 checksum.py       hashes of pages
 agents/           the two ends: sender* is prefill's, receiver* is decode's; both run in a control thread
                   (control.py); group.py joins the agents of all ranks
 transports/       copies → bytes in the remote pool
```

It works with a `KVLayout` and a `MemoryRegion`, without models or tensors.
"""
