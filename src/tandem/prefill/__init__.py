"""The prefill node: computes the KV of prompts and pushes it into the memory of decode nodes."""
