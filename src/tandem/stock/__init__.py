"""Makes nodes of unmodified inference servers: the router's protocol on one side, the server's HTTP API on the other."""
