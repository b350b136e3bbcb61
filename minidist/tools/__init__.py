"""Observers: nothing below imports them. Read `equivalence.py`."""
