"""The router's processes: the launcher and its edge workers."""
