"""`tandem doctor`: checks what works, measures how fast KV moves, and advises on problems.

```
 machine.py  this machine, with a node's default pool ─▶ Finding  ┐
 nodes.py    running nodes, and which of them can pair ─▶ Finding ├─▶ Report (report.py)
 link.py     hand-offs over each transport ─▶ TransportRow        ┘
```
"""
