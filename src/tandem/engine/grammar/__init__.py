"""Structured output: compiled grammars and the tokens that they allow."""
