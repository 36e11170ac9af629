"""HTTP: server, middleware, keys, event streams."""
