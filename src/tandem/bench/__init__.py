"""`tandem bench`: drives a server with a load and says how it served it.

```
 arrivals.py  trace.py  lengths ─▶ workload.py  Jobs of a Load ─▶ one ClientPlan for each process
                                                                       │
 processes.py  starts the clients, gives all the same start ───────────┤
 client.py     one of them: dispatches jobs ─ http.py a connection ─ answer.py counts tokens
                                                                       │ Samples, as they end
 live.py ◀── progress ─────────────────────────────────────────────────┤
 statistics.py  Samples ─▶ LoadReport ─▶ report.py (JSON) ─▶ table.py, page.py + plots.py (HTML)
```

What decides (arrivals, trace, workload, prompts, answer, statistics, report) opens no socket and reads
no clock. Nothing here imports torch.
"""
