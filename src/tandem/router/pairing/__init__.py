"""The choice of the prefill and the decode node of a request."""
