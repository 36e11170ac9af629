"""How fast one node computes: its forwards measured, and the profile that describes them."""
