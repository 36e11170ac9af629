"""The prefill node: computes the KV of prompts and pushes it into decode nodes' memory."""
