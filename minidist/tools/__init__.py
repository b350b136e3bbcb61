"""Observers: nothing below imports them.

Is it right?  `equivalence.py` with `compare.py`, `strategies/` (what is run), `replay.py` and
`replay_server.py` (oracles of stale weights). What did it do?  `timeline.py` with
`timeline_figure.py`, `tracks.py`, `action_names.py`, `chrome_trace.py`. What does it cost?
`volume.py` (bytes, closed forms), `activations.py` (what a graph keeps), `measure_pipeline.py` (a
schedule for real), `bench*.py` (against others). For the lessons: `figures.py`, `exercise.py`,
`devices.py`.
"""
