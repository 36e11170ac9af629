"""The pages of KV: the pool, the prefix cache and who holds each page."""
