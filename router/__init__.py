"""Pairs a prefill with a decode node, watches them, and replays what a dead node dropped.

Its edge workers hold the clients' sockets. It starts without torch.
"""
