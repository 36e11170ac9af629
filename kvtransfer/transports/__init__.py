"""Ways to get bytes into another process's pool, behind the seam in `base`."""
