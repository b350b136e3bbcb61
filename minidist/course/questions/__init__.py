"""What each lab asks a student's code, and what the answers must be: a file per lab.

`arrays.py` compares what one process answers, `ranks.py` what several have.
"""
