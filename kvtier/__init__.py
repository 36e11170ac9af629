"""Keeps pages of KV beyond the device's pool: in host memory, on disk, in a store that nodes share.

```
 stack.py   what a node talks to: fetch, place, save; answers are events, no call waits
   │           two worker threads for each tier, fastest first; time limits, back-off
   ├── core.py  what it decides, pure: fetches.py  puts.py  link.py  back_off.py  cost.py
   │
 tier.py    what one tier is: has, get, put of runs of pages by content key
   └── host.py  disk.py  redis.py ...
 spec.py    `--kv-tier host:8GiB`, read
```

It is given the pool's bytes (`PoolPages`) and keys (`tandem.wire.page_keys`); it knows no model, no request, no tensor.
"""
