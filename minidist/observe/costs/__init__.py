"""What a step under each strategy costs each rank: measured, and in one table.

measured.py   a real step, watched by `verify/watch.py`
table.py      a row per strategy

The exact prediction is in planning/costs/; each strategy's record refers to it.
"""
