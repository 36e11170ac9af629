"""The parts of a rank: its shard of the model, its part of the pool, its links."""
