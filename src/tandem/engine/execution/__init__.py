"""One forward on one device or on several ranks."""
