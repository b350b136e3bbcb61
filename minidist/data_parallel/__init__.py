"""The batch split over ranks.

Every rank holds the whole model: read `naive.py`, `bucketed.py`. Every rank keeps a different part
of the model: `zero.py`. Some ranks keep the weights for all others: `parameter_server.py`, then
`server_plan.py` (what they agree on) and `sparse_update.py`.
"""
