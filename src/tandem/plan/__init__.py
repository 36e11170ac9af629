"""How many of which nodes: a cluster in virtual time, and a search over its sizes."""
