"""`tandem bench`: sends a load of streamed requests to a server and measures latencies and throughput.

```
 config.py ─▶ workload.py  the Jobs of a Load, and their prompts
                  │
 client.py   sends the Jobs over aiohttp ─▶ a Sample of each
                  │
 report.py   Samples ─▶ LoadReport ─▶ JSON, table
```

Only `client.py` and `command.py` open sockets and read clocks. Nothing here imports torch.
"""
