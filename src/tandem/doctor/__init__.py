"""`tandem doctor`: what works here, how fast it is against what it could be, and what to do about it.

```
 gather.py  Facts of this machine ─▶ checks.py ─▶ Finding ┐
 nodes.py   NodeAnswer of each URL ─▶ pairing.py ─▶ Finding ├─▶ Report ─▶ render.py
 measuring.py  Outcome of each transport ─▶ judging.py ─▶ TransportRow ┘
    └─ two processes of probe.py for each: here, or one on either host (pair.py)
```

What is gathered and measured knows nothing of what it means; what judges opens no file and no socket.
"""
