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


def half(x, y):
    if x:
        z = x * y
    return x * y + 1
'''


def edited(function, replace, by):
    return Edit(f"ring.py:{function}", by, replace).apply(SOURCE)


def changed_lines(source):
    before = SOURCE.splitlines()
    return [line for line in source.splitlines() if line not in before]


def test_layout_comments_and_quotes_do_not_count_and_all_else_stays_as_it_is():
    found = edited("Ring.send", 'group.send(part[number], label="ring")', "part.sort()")
    assert changed_lines(found) == ["            part.sort()"]
    assert "# a comment" in found and '"""Send them."""' in found


@pytest.mark.parametrize(
    "replace, by",
    [
        ('group.send(part[number], label="ring")', "group.send(part, number)"),
        ('g.send(p[i], label="ring")', "g.send(p, i)"),
        ("for i, p in enumerate(a):\n    g.send(p[i], label='ring')", None),
    ],
)
def test_local_names_match_any_local_names_and_by_is_written_in_those_of_the_function(replace, by):
    by = by or "for i, p in enumerate(a):\n    g.send(p, i)"
    lines = changed_lines(edited("Ring.send", replace, by))
    assert lines[-1] == "            group.send(part, number)"


def test_a_local_name_is_the_same_one_everywhere_in_an_edit():
    for replace in ("a * b + 1", "b * a + 1"):
        assert "return x + 1" in edited("half", replace, f"{replace[0]} + 1")
    with pytest.raises(ValueError, match="is 0 times"):
        edited("half", "a * a + 1", "0")
    source = "def f(x, y):\n    return x * x + x * y\n"
    assert Edit("f.py:f", "a", "a * b").apply(source).endswith("x * x + x\n")


@pytest.mark.parametrize(
    "replace",
    [
        "group.send(part[number], name='ring')",  # a keyword
        "group.send(part[number], label='star')",  # a literal
        "group.recv(part[number], label='ring')",  # an attribute
        "[part for part in parts if cmath.isfinite(part)]",  # a module's name
        "group.send(part[number])",
        "part[number:]",
    ],
)
def test_all_other_names_and_literals_are_what_they_are(replace):
    with pytest.raises(ValueError, match=r"is 0 times in ring\.py:Ring\.send, not once"):
        edited("Ring.send", replace, "pass")


def test_self_is_no_name_like_any_other():
    source = "class A:\n    def f(self, other):\n        return self.x + other.x\n"
    assert Edit("a.py:A.f", "0", "self.x").apply(source).endswith("return 0 + other.x\n")


def test_two_places_are_refused_and_a_wider_piece_is_one():
    with pytest.raises(ValueError, match=r"'x \* y' is 2 times in ring\.py:half, not once"):
        edited("half", "x * y", "0")
    assert changed_lines(edited("half", "z = x * y", "z = 0")) == ["        z = 0"]


def test_statements_in_a_row_become_others_and_their_number_may_differ():
    found = edited("half", "if a:\n    c = a * b\nreturn a * b + 1", "c = a\nreturn c")
    assert found.endswith("def half(x, y):\n    z = x\n    return z\n")
    found = edited("half", "z = x * y", "z = y\nz *= x")
    assert changed_lines(found) == ["        z = y", "        z *= x"]


def test_without_replace_the_whole_body_but_for_its_docstring_becomes_another_one():
    found = edited("Ring.send(self, a, g)", "", "for b in a:\n    g.send(b)")
    assert found.partition("\n\n\ndef")[0].endswith(
        'def send(self, parts, group):\n        """Send them."""\n'
        "        for b in parts:\n            group.send(b)"
    )


def test_an_edit_may_say_what_it_calls_the_arguments():
    assert "return a * b" not in edited("half(a, b)", "return a * b + 1", "return b")
    assert edited("half(a, b)", "return a * b + 1", "return b").endswith("return y\n")
    with pytest.raises(ValueError, match="is 0 times"):
        edited("half(a, b)", "b * a + 1", "0")


def test_a_local_name_in_by_alone_is_refused():
    with pytest.raises(ValueError, match=r"number is local there, and the edit names it in `by`"):
        edited("Ring.send", "enumerate(parts)", "enumerate(parts, number)")
    with pytest.raises(ValueError, match="x is local there"):
        edited("half", "", "return x")


def test_an_operator_inside_of_another_one_gets_parentheses():
    source = "def f(x, y, z):\n    return x * g(y) * z\n"
    assert "x * (y + 1) * z" in Edit("f.py:f", "y + 1", "g(y)").apply(source)
    assert "x * g(y + 1) * z" in Edit("f.py:f(x, y, z)", "y + 1", "y").apply(source)
    source = "def f(x):\n    yield from g(x)\n"
    assert "    yield x + 1\n" in Edit("f.py:f", "yield x + 1", "yield from g(x)").apply(source)


def test_characters_of_several_bytes_move_nothing():
    source = 'def f(x):\n    return g("é", "ü", x), x\n'
    assert Edit("f.py:f", "x + 1", "g('é', 'ü', x)").apply(source).endswith("return (x + 1), x\n")


def test_a_function_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"ring.py has no function Ring.recv; name the one"):
        edited("Ring.recv", "pass", "pass")


def test_what_is_no_python_is_refused():
    for replace, by in (("return x +", "pass"), ("return x", "return )")):
        with pytest.raises(ValueError, match=r"ring\.py:half: 'return .*' is not valid Python: "):
            edited("half", replace, by)


def test_an_f_string_is_replaced_as_a_whole():
    source = 'def f(x):\n    return f"{x + 1} and {x}"\n'
    assert Edit("f.py:f(x)", 'f"{x}"', 'f"{x + 1} and {x}"').apply(source).endswith('f"{x}"\n')
    with pytest.raises(ValueError, match="is 0 times"):
        Edit("f.py:f", "x", "x + 1").apply(source)
