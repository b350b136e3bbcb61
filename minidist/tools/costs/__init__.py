"""What a step under each strategy costs each rank: measured, and all in one table.

measured.py   a step for real, watched by `watch.py`
table.py      a row per strategy

What it should cost, exactly, is in planning/costs/, by each strategy's record.
"""
