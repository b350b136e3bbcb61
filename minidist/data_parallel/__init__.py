"""The batch split over ranks; every rank holds the whole model. Read `naive.py`, `bucketed.py`."""
