"""Keeps pages of KV beyond the device's pool: in host memory, on disk, in a store that nodes share.

```
 stack.py   what a node talks to: fetch, place, save; answers are events, no call waits
   └── guard.py   one tier behind threads of its own: a deadline for each get, a breaker, what its answers cost
 tier.py    what one tier is: get and put of runs of pages by content key
   └── host.py   disk.py   redis.py   packages of their own, such as contrib/tandem-mooncake
 spec.py    `--kv-tier host:8GiB`, read
```

It is given the pool's bytes (`PoolPages`) and keys (`PageKey`); it knows no model, no request, no tensor.
"""
