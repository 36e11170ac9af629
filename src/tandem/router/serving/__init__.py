"""One request in the router: its attempts, replays and progress."""
