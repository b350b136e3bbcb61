"""A folder per lab; and what the probes, which run beside a student's code, need of the course.

A probe returns {name: what makes an array of numbers, truth values or text}; it knows no answer. In
the sandbox this file, ranks.py and one lab's probes are all that there is of the course.
"""


def load(name: str) -> dict:
    """Import a module: whether a student's file can be."""
    __import__(name)
    return {}
