"""Closed forms of what a step under each strategy moves, holds and computes, exact to the byte.

collectives.py          one all_reduce, by algorithm
data_parallel.py        gradient averaging; batch norm's sums; ZeRO's stages
zero.py                 what ZeRO holds and moves, by stage: the table of them all
compression.py          gradients sent in part; weights averaged rarely
parameter_server.py     servers and workers
pipeline_parallel.py    programs of any schedule, synchronous or not
branch_placement.py     two branches on two ranks
context_parallel.py     positions: ring attention, Ulysses; attention.py: one layer's
expert_parallel.py      experts over ranks, for the routing that a model draws on one device
tensor_parallel.py      matrices, heads, vocabulary, sequence; one Transformer block
convolutions.py         channels, and rows of images
mixed_precision.py      16-bit weights, gradients and activations
hybrid.py               data x pipeline x context x tensor, experts within data
single_device.py        no strategy at all
cost.py, layers.py      what they are made of: a rank's `Cost`, and the numbers of a layer
decoding.py             a cache of keys and values
gradients.py            where backward ends, if a prefix of a model is frozen

For models of any size, without arrays (planning/plans/plan.py):

transformer_size.py     parameters, FLOPs
stages.py, stash.py     the layers of each rank of a pipeline; the passes that it has in flight
kept.py, memory.py      bytes of activations, by two conventions; bytes that a rank holds

Two kinds of functions: `*_bytes` returns what ranks send, `*_costs` one `Cost` per rank. Those of a
strategy take a `Workload` and the number of ranks, and are fields of its record in
verify/strategies/. Letters: N ranks, r one of them; B examples, T positions, C width, H heads,
V tokens; X = T C numbers of one example between two layers; P parameters.

Domain of `*_bytes`: float64 where matrices are split. Parameters may be frozen; what a docstring
says of a block holds where all are trained. Domain of `*_costs`: an untied nn.Transformer without
dropout, an nn.MLP with gelu, an nn.CNN, or an nn.Siamese with relu, in float64, under AdamW; N
divides what a strategy splits.
"""
