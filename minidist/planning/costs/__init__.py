"""Closed forms of what a step under each strategy moves, holds and computes, exact to the byte.

collectives.py          one all_reduce, by algorithm
data_parallel.py        gradient averaging; ZeRO's stages
parameter_server.py     servers and workers
pipeline_parallel.py    programs of any schedule, synchronous or not
branch_placement.py     two branches on two ranks
tensor_parallel.py      matrices, heads, vocabulary, sequence; one Transformer block
hybrid.py               data x pipeline x tensor
single_device.py        no strategy at all
cost.py, layers.py      what they are made of: a rank's `Cost`, and the numbers of a layer

Two kinds of functions: `*_bytes` returns what ranks send, `*_costs` one `Cost` per rank. Those of a
strategy take a `Workload` and the number of ranks, and are fields of its record in
tools/strategies/. Letters: N ranks, r one of them; B examples, T positions, C width, H heads,
V tokens; X = T C numbers of one example between two layers; P parameters.

Domain of `*_bytes`: float64 where matrices are split, and there no layer frozen below one that is
trained. Domain of `*_costs`: an untied nn.Transformer without dropout, an nn.MLP with gelu, or an
nn.Siamese with relu, in float64, under AdamW; N divides what a strategy splits.
"""
