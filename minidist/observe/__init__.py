"""Observers of a run: the library imports nothing from here.

What did it do?       timeline/ (text, figure, file), chrome_trace.py (for Perfetto),
                      measure_pipeline.py (a schedule run for real beside its simulation)
What does it cost?    costs.py (a step of every strategy, measured; what papers say is in
                      planning/costs/, what a graph keeps in autograd/recomputation.py)
How fast is it?       step_parts.py (a step: its products and the rest), profile.py (its layers)
How do figures look?  style.py
"""
