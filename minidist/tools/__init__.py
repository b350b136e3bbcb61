"""Observers: the library imports nothing from here.

Is it right?          `equivalence.py` with `compare.py`, `strategies/` (what is run), `replay.py`
                      and `replay_server.py` (references for stale weights); `certificate.py` (of a
                      training run)
Why not?              `causes/`
What did it do?       `timeline/`, `chrome_trace.py` (for Perfetto), both on `tracks.py`;
                      `measure_pipeline.py` (a schedule run for real, and its simulation)
What does it cost?    `activations.py` (what a graph keeps), `costs/` (a step of every strategy,
                      measured; closed forms are in planning/costs/)
How fast is it?       `bench/` (against others), `machine/` (predicted from this machine's rates)
For the lessons       `figures.py`, `exercise.py`, `devices.py`
"""
