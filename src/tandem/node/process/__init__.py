"""The processes of a node: HTTP, engine, ranks."""
