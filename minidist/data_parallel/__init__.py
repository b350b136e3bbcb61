"""The batch split over ranks.

Every rank holds the whole model: read `naive.py`, then `replicated.py`, which trains with it, and
`bucketed.py`; where the examples of a batch depend on each other, `sync_batch_norm.py`; where a
part of the sum is left out or comes later, `compression.py`, `power_sgd.py`, `local_sgd.py`,
`streaming_diloco.py`. Every rank keeps a different part of the model: `zero.py`, with
`zero_layers.py`; between hosts with a slow network, `hierarchical_zero.py` and
`quantized_gather.py`. Some ranks keep the weights for all others: `parameter_server.py`.
"""
