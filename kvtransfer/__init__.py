"""Moves pages of KV between two processes' memories.

```
 sender.py    prefill's end   ┐ both run session.py (who may do what, when) over wire.channel,
 receiver.py  decode's end    ┘ in a control thread of their own
 plan.py      pages and tokens → contiguous copies        region.py  memory both ends can name
 checksum.py  which bytes are hashed                     layer_push.py  pushing while computing
 transports/  contiguous copies → bytes in the far pool   layout.py  the shape of a page
```

It is given a `KVLayout` and a `MemoryRegion`; it knows no model and no tensor.
"""
