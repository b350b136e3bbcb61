"""From wrong numbers to the mistake that leaves them: words for red rows and failing tests.

reasons.py   by arithmetic: a factor, lost digits, the right numbers at other places
             of wrong gradients as finding.py has them; examples.py: which examples are in the sum
rerun.py     of a strategy of the package: the case runs again with each mistake of the register
"""
