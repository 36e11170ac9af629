"""`tandem doctor`: what works here, how fast KV moves, and what to do about the rest.

```
 machine.py  this machine, and whether a model fits ─▶ Finding ┐
 nodes.py    running nodes, and which of them pair ─▶ Finding  ├─▶ Report (report.py)
 link.py     hand-offs over each transport ─▶ TransportRow     ┘
```
"""
