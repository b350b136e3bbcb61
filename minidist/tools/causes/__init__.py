"""From wrong numbers to the mistake that leaves them: words for the messages of failing tests.

gradients.py    of gradients: is it exactly what `counterfactuals.py` computes (`finding.py`), a
                factor (`factors.py`), or a part of the batch (`examples.py`)?
cause_of.py     of sums, norms, versions, replays and bytes
"""
