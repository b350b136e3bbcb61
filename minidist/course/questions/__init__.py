"""What each lab asks a student's code, and what the answers must be: a file per lab.

`arrays.py` compares the arrays of one process, `ranks.py` those of several ranks.
"""
