"""`tandem bench`: sends a load of streamed requests to a server and measures latencies and throughput.

```
 config.py ─▶ load.py       when each request is due, and its prompt
                 │
 processes.py ─▶ client.py  sends them over aiohttp ─▶ a Sample of each
                 │
 report.py    Samples ─▶ LoadReport ─▶ JSON, table
```

Nothing here imports torch.
"""
