"""A folder per lab. In the sandbox the course is this, ranks.py and a part of a lab's tests."""


def load(name: str) -> dict:
    """Import a module: whether a student's file can be."""
    __import__(name)
    return {}
