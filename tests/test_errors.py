"""What a caller can get wrong anywhere: options that are none."""

from functools import partial

import pytest

from minidist.errors import check_options


def trained(model, rate=0.1, *, steps):
    pass


def anything(model, **options):
    pass


@pytest.mark.parametrize(
    "function, message",
    [
        (trained, "a run has no option 'model'; it has rate, steps"),
        (partial(trained, steps=3), "a run has no option 'model'; it has rate, steps"),
        (len, "a run has no option 'model'; it has none"),
    ],
)
def test_an_option_that_is_none_is_named_beside_those_there_are(function, message):
    with pytest.raises(ValueError) as caught:
        check_options(function, {"model": 1}, "a run")
    assert str(caught.value) == message


def test_options_that_a_function_has_may_be_given():
    assert check_options(trained, ["rate", "steps"], "a run") is None
    assert check_options(trained, ["seed"], "a run", also=["seed"]) is None
    assert check_options(anything, ["seed"], "a run") is None
