"""KV pages outside the device's pool: in host memory, on disk, or in a store that nodes share.

```
 stack.py   the node's interface: fetch, place, save; no call blocks, results are events
   └── guard.py   one tier on its own threads: a deadline for each get, a circuit breaker, measured costs
 tier.py    the interface of a tier: get and put runs of pages by content key
   └── host.py   disk.py   redis.py   separate packages, such as contrib/tandem-mooncake
 spec.py    parses `--kv-tier host:8GiB`
```

Tiers see the pool's bytes (`PoolPages`) and page keys (`PageKey`), never a model, a request or a tensor.
"""
