"""This machine measured, and the step of every strategy predicted from it.

timed_functions.py  the functions of a graph that are timed, and their sizes
rates.py            seconds of single functions, updates, collectives and messages
trace.py            what a rank does in a step, counted without a clock
prediction.py       the seconds of a step, from both
steps.py            the seconds of a step, by the clock
table.py            one over the other, for all strategies: `minidist plan --measure`

What a prediction leaves out: NumPy's work outside of functions (a compressor's, a router's), and
caches that another rank has emptied, since each function is timed by itself.
"""

from minidist.observe.machine.rates import products
from minidist.observe.machine.table import HEAD, line, predict_and_measure, summary

__all__ = ["HEAD", "line", "predict_and_measure", "products", "summary"]
