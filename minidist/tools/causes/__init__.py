"""From wrong numbers to the mistake that leaves them: words for the messages of failing tests.

gradients.py         asks each of these in turn: do the gradients (`finding.py`) show this mistake?
factors.py           every gradient is too large or too small by one factor
examples.py          some examples of the batch are missing, or count twice
counterfactuals.py   what one device computes with a mistake in biases, masks, statistics, ...
context.py           attention over a cut sequence
convolutions.py      channels, and rows of images
experts.py           experts whose drops or sums depend on the ranks
cause_of.py          of wrong sums, norms, versions, replays and bytes
"""
