"""Code shared by all node roles: the checkpoint, the engine process, the HTTP process.

The roles import this package, so that prefill and decode need not import each other.
"""
