"""Observers: nothing below imports them.

Is it right?      `equivalence.py` with `compare.py`, `strategies/` (what is run), `replay.py` and
                  `replay_server.py` (oracles of stale weights)
Why not?          `causes.py` with `finding.py` and `counterfactuals.py`, of gradients;
                  `cause_of.py` of the rest
What did it do?   `timeline.py` with `timeline_figure.py`, `tracks.py`, `action_names.py`,
                  `chrome_trace.py`
What does it      `volume.py` (closed forms), `activations.py` (what a graph keeps),
cost?             `strategy_costs.py` with `strategy_watch.py` (measured), `strategy_forms.py`
                  (in closed form) and `strategy_table.py`; `measure_pipeline.py` (a schedule for
                  real), `bench*.py` (against others)
For the lessons   `figures.py`, `exercise.py`, `devices.py`
"""
