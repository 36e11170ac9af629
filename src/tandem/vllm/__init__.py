"""vLLM as an engine of our nodes, and our hand-off as a KV connector of vLLM.

```
 node's loop ── role.py ──▶ vLLM's EngineCore ──▶ scheduler ── connector.py ── halves.py: who pushes what, who may be freed
                engine.py    requests.py              │ orders, each step        ▲ reports
                                                      ▼                          │
                                                  each rank's worker ── worker.py: an agent of kvtransfer
                                                                        caches.py: where vLLM keeps its pages
```

Only `connector.py`, `kv_config.py`, `requests.py` and `generator.py` import vLLM. Its connector runs as well under an unmodified `vllm serve`.
"""
