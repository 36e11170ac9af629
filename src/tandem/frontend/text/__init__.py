"""Conversion between text and token ids: chat templates, tokenizer, detokenizer, stops."""
