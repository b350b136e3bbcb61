"""The batch split over ranks.

Every rank holds the whole model: read `naive.py`, `bucketed.py`. No two ranks keep the same thing:
`zero.py`. Some ranks keep the weights for all others: `parameter_server.py`, then `server_plan.py`
(what they agree on) and `sparse_update.py`.
"""
