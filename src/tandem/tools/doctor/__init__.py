"""`tandem doctor`: reports what this machine has, and measures how fast KV moves over each transport.

`machine.py` checks this machine and `link.py` each transport. Both return findings, which `report.py` prints.
"""
