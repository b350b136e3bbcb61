"""What each lab asks a student's code: a file per lab.

The right answer is what the package answers itself: `arrays.py` compares. A question with several
right answers, as a schedule or a plan of buckets, has a judge of its own.
"""
