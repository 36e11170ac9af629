"""What all node roles share: the checkpoint, the engine process, the HTTP process.

This package sits between the roles and the capabilities, so that prefill and decode need not import each other.
"""
