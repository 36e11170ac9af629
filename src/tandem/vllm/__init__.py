"""vLLM as the engine of a Tandem node, and Tandem's hand-off as a KV connector for vLLM.

```
 node's loop ── role.py ──▶ vLLM's EngineCore ──▶ scheduler ── connector.py ── hand_offs.py: which blocks to push, which to free
                engine.py    requests.py              │ orders, each step        ▲ reports
                                                      ▼                          │
                                                  each rank's worker ── worker.py: one kvtransfer agent
                                                                        caches.py: where vLLM's blocks lie
```

Only `connector.py`, `kv_config.py`, `requests.py` and `generator.py` import vLLM. The connector also runs under
an unmodified `vllm serve`.
"""
