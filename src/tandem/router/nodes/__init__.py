"""The router's view of each node: its link, health, load and cached prefixes."""
