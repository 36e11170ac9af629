"""KV events: the format in which vLLM, SGLang and this project report what a cache holds."""
