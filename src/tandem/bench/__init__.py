"""`tandem bench`: sends a load of streamed requests to a server and measures how it was served.

```
 config.py ─▶ workload.py  Jobs of a Load, and their prompts
                  │
 client.py   sends them over aiohttp ─▶ Samples, as they end
                  │
 report.py   Samples ─▶ LoadReport ─▶ JSON, table
```

Only `client.py` opens sockets and reads clocks. Nothing here imports torch.
"""
