"""From wrong numbers to the mistake that leaves them: words for red rows and failing tests.

diagnosis.py   what a red row of `verify` says: arithmetic first, then the register
gradients.py   asks each of the next four: are the wrong gradients (`finding.py`) sums or multiples?
factors.py     every gradient is too large or too small by one factor
examples.py    some examples of the batch are missing, or count twice
example_counts.py  of a reader's function: how often each example counts, by least squares
places.py      of a reader's function: the right numbers are at other places
rerun.py       any other mistake: the case runs again with the register's, and numbers are compared
cause_of.py    of wrong versions of weights, and of wrong replays
"""
