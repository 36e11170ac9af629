"""The decode node: takes over prompts whose KV landed in its memory, and generates."""
