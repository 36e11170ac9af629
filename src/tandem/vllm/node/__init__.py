"""vLLM as the engine of a node."""
