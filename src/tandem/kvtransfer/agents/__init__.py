"""The two ends of the transfer: threads, links and rooms of prefill and decode."""
