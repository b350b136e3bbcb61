"""Bodies are taken out, and nothing else."""

import pytest

from minidist.course.blank import blank

SOURCE = """def before(a):
    return a  # kept


class Pair:
    def first(self, a):
        \"\"\"Return a.\"\"\"
        # how it is done

        # is said here
        b = a
        return b

    def second(
        self,
    ):
        # the trick
        return [
            1,
        ]


def after(a):
    # kept
    return a
"""
BLANKED = """def before(a):
    return a  # kept


class Pair:
    def first(self, a):
        \"\"\"Return a.\"\"\"
        raise NotImplementedError("write \\"it\\"")

    def second(
        self,
    ):
        raise NotImplementedError("this")


def after(a):
    # kept
    return a
"""


def test_a_body_goes_with_its_comments_and_all_around_it_stays():
    assert blank(SOURCE, {"Pair.second": "this", "Pair.first": 'write "it"'}) == BLANKED


def test_what_cannot_be_taken_out_is_refused():
    with pytest.raises(ValueError, match=r"no function Pair\.third"):
        blank(SOURCE, {"Pair.third": ""})
    with pytest.raises(ValueError, match="is on one line"):
        blank("def f(): return 1", {"f": ""})
