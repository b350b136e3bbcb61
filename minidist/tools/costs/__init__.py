"""What a step under each strategy costs each rank: measured, predicted, and all in one table.

measured.py        a step for real, watched by `watch.py`
closed_forms.py    what it should cost, exactly
table.py           a row per strategy
"""
