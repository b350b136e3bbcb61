"""Observers of a run: the library imports nothing from here.

What did it do?       timeline/ (drawn or in text), chrome_trace.py (for Perfetto), both on
                      tracks.py; measure_pipeline.py (a schedule run for real beside its simulation)
What does it cost?    costs/ (a step of every strategy, measured; closed forms are in
                      planning/costs/, what a graph keeps in autograd/kept.py)
How fast is it?       profile.py (of the layers)
Where does it go?     products.py (a step's products alone), step_parts.py (they and the rest)
How do figures look?  style.py
"""
