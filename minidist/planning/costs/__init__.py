"""What a step moves, holds and computes, without a run: what papers print, and what a plan needs.

What papers print, equal to the byte to what ranks sent; all else is measured (observe/costs.py):

collectives.py          one all_reduce, by algorithm
zero.py                 what ZeRO holds and moves, by stage: the table of them all
strategies.py           a step of a strategy: the `bytes` of its record in verify/strategies/
layers.py               one layer: attention over a cut sequence, a block of a CNN

What a plan of a Transformer of any size needs, without arrays (planning/plans/plan.py):

transformer_size.py     parameters, FLOPs
stages.py               the layers of each rank of a pipeline; the passes that it has in flight
memory.py               bytes that a rank holds; those of activations by two conventions
traffic.py              bytes that a rank sends, along each axis

Letters: N ranks, r one of them; B examples, T positions, C width, H heads, V tokens; P parameters.
"""
