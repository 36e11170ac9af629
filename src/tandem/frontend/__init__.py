"""The HTTP frontend: APIs, chat templates, tokenization, detokenization and streams.

It generates tokens through a `Backend` and does not import torch.
"""
