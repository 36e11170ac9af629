"""JSON schemas of structured output: what a schema says is held, or the schema is refused."""
