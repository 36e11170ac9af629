"""What every node role shares: its checkpoint, its engine process, its HTTP process.

Sits between the roles and the capabilities, so that prefill and decode need not import each other.
"""
