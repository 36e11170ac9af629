"""The APIs: OpenAI, native, Anthropic, Responses, tokenizing."""
