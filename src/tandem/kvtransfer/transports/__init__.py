"""Transports, which write into another process's pool; `base` defines their interface."""
