"""Sends many requests to a cluster or to any OpenAI server, as `tandem batch` or from code.

```
 input file ─▶ command.py ─▶ client.py: retries ─▶ server
 output file ◀─ command.py ◀─ results, in order of completion
```

From code, without files:

```python
from tandem.batch import BatchClient, BatchRequest

client = BatchClient("http://127.0.0.1:8000")
async for result in client.run(BatchRequest(name, body) for name, body in bodies):
    print(result.custom_id, result.text)
```
"""

from tandem.batch.client import (
    BatchClient,
    BatchSettings,
    BatchStopped,
    KeyRefused,
    ServerAway,
    run_batch,
)
from tandem.batch.lines import BatchError, BatchRequest, BatchResult

__all__ = [
    "BatchClient",
    "BatchError",
    "BatchRequest",
    "BatchResult",
    "BatchSettings",
    "BatchStopped",
    "KeyRefused",
    "ServerAway",
    "run_batch",
]
