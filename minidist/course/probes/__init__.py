"""What each lab calls beside a student's code; a file per lab, and none knows an answer.

The grader calls the same probes on the package, whose answers are the right ones.

A probe returns {name: what makes an array of numbers, truth values or text}. In the sandbox this
folder, with one lab's file, is all that there is of the course.
"""


def load(name: str) -> dict:
    """Import a module: whether a student's file can be."""
    __import__(name)
    return {}
