"""Many requests through a cluster, or a list of servers: `tandem batch`, and the same from code.

```
 file or code ─▶ client.py: a task for each request under way ─▶ results as they come ─▶ journal.py ─▶ output
                   │ where?                    ▲ how many?
                   └──▶ servers.py ────────────┴── pace.py ◀── looks.py: what waits at the server
```

From code, where nothing is written to a disk:

```python
from tandem.batch import BatchClient, BatchRequest

async with BatchClient(["http://127.0.0.1:8000"]) as client:
    async for result in client.run(BatchRequest(name, body) for name, body in bodies):
        print(result.custom_id, result.text)
```
"""

from tandem.batch.client import BatchClient, BatchSettings, run_batch
from tandem.batch.servers import BatchStopped, KeyRefused, ServersAway
from tandem.batch.values import BatchError, BatchRequest, BatchResult

__all__ = [
    "BatchClient",
    "BatchError",
    "BatchRequest",
    "BatchResult",
    "BatchSettings",
    "BatchStopped",
    "KeyRefused",
    "ServersAway",
    "run_batch",
]
