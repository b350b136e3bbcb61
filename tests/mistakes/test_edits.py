"""Edits find their place by the syntax tree: layout and local names do not count."""

import pytest

from minidist.verify.mistakes.edits import Edit

SOURCE = '''import math


class Ring:
    def send(self, parts, group):
        """Send them."""
        for number, part in enumerate(parts):  # a comment
            group.send(
                part[number],
                label='ring',
            )
        return [part for part in parts if math.isfinite(part)]

    def compare(self, other):
        return self.x + other.x


def half(x, y):
    if x:
        z = x * y
    return x * y + 1


def nested(x, y, z):
    return x * g(y) * z


def generator(x):
    yield from g(x)
    return g("é", "ü", x), f"{x + 1} and {x}"
'''
EDITS = [  # function, replace, by, the lines that are new
    ("Ring.send", 'group.send(part[number], label="ring")', "part.sort()", "part.sort()"),
    ("Ring.send", 'g.send(p[i], label="ring")', "g.send(p, i)", "group.send(part, number)"),
    (
        "Ring.send",
        "for i, p in enumerate(a):\n    g.send(p[i], label='ring')",
        "for i, p in enumerate(a):\n    g.send(p, i)",
        "for number, part in enumerate(parts):\n    group.send(part, number)",
    ),
    (  # without replace: the whole body but for its docstring
        "Ring.send(self, a, g)",
        "",
        "for b in a:\n    g.send(b)",
        "for b in parts:\n    group.send(b)",
    ),
    ("Ring.compare", "self.x", "0", "return 0 + other.x"),  # self is no name like any other
    ("half", "a * b + 1", "a + 1", "return x + 1"),
    ("half", "b * a + 1", "b + 1", "return x + 1"),  # a name is one everywhere in an edit
    ("half", "z = x * y", "z = y\nz *= x", "z = y\nz *= x"),
    ("half", "if a:\n    c = a * b\nreturn a * b + 1", "c = a\nreturn c", "z = x\nreturn z"),
    ("half(a, b)", "return a * b + 1", "return b", "return y"),
    ("nested", "g(y)", "y + 1", "return x * (y + 1) * z"),
    ("nested(x, y, z)", "y", "y + 1", "return x * g(y + 1) * z"),
    ("generator", "yield from g(x)", "yield x + 1", "yield x + 1"),
    ("generator", "g('é', 'ü', x)", "x + 1", 'return (x + 1), f"{x + 1} and {x}"'),
    ("generator(x)", 'f"{x + 1} and {x}"', 'f"{x}"', 'return g("é", "ü", x), (f"{x}")'),
]


def edited(function, replace, by):
    return Edit(f"ring.py:{function}", by, replace).apply(SOURCE)


def test_an_edit_changes_its_place_and_all_else_stays_as_it_is():
    before = SOURCE.splitlines()
    for function, replace, by, new in EDITS:
        lines = edited(function, replace, by).splitlines()
        changed = [line.strip() for line in lines if line not in before]
        assert changed == [line.strip() for line in new.splitlines() if line not in before], replace
        assert '        """Send them."""' in lines


REFUSED = [
    ("Ring.send", "group.send(part[number], name='ring')", "pass", "is 0 times"),  # a keyword
    ("Ring.send", "group.send(part[number], label='star')", "pass", "is 0 times"),  # a literal
    ("Ring.send", "group.recv(part[number], label='ring')", "pass", "is 0 times"),  # an attribute
    ("Ring.send", "[a for a in b if cmath.isfinite(a)]", "pass", "is 0 times"),  # a module's name
    ("Ring.send", "group.send(part[number])", "pass", "is 0 times"),
    ("Ring.send", "part[number:]", "pass", "is 0 times"),
    ("half", "a * a + 1", "0", r"is 0 times in ring\.py:half, not once"),
    ("half(a, b)", "b * a + 1", "0", "is 0 times"),
    ("half", "x * y", "0", r"'x \* y' is 2 times in ring\.py:half, not once"),
    ("generator", "x + 1", "x", "is 0 times"),  # inside of an f-string
    ("Ring.send", "enumerate(parts)", "enumerate(parts, number)", "number is local there, and the"),
    ("half", "", "return x", "x is local there"),
    ("Ring.recv", "pass", "pass", "ring.py has no function Ring.recv; name the one"),
    ("half", "return x +", "pass", r"ring\.py:half: 'return .*' is not valid Python: "),
    ("half", "return x", "return )", r"ring\.py:half: 'return .*' is not valid Python: "),
]


def test_what_is_not_there_once_or_no_python_is_refused():
    for function, replace, by, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            edited(function, replace, by)
