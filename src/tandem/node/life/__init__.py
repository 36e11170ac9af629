"""The states of a node, and the pipe between its HTTP process and its engine process."""
