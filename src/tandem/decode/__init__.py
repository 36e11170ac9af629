"""The decode node: receives the KV of prompts into its memory, and generates."""
