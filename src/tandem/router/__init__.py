"""The router: pairs a prefill with a decode node for each request, and replays requests that a failed node dropped.

Its edge workers hold the clients' connections. It runs without torch.
"""
