"""HTTP, OpenAI and native schemas, chat templates, tokenizing, detokenizing, SSE.

It is given a `Backend` and starts without torch.
"""
