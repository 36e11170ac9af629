"""`tandem batch`: sends a file of requests to a cluster, or to any OpenAI server.

```
 input file ─▶ command.py ─▶ client.py: retries ─▶ server
 output file ◀─ command.py ◀─ results, in order of completion
```
"""
