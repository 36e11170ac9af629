"""How many nodes of which kind a load takes, by arithmetic."""
