"""Parsers for the tool calls and the reasoning in a model's reply."""
