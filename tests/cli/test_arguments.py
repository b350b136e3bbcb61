"""Every number of the command line has a bound, and an error names it and its reason."""

import argparse
import re
from pathlib import Path

import pytest

from minidist.cli import COMMANDS, _parser, main, parser_of
from minidist.cli.options import number, whole
from minidist.cli.plan import amount

WORDS = {  # of options and positional arguments that are no numbers
    "FILE",
    "FOLDER",
    "DIR",
    "NAME",
    "NAME,NAME",
    "SCHEDULE",
    "TEXT",
    "LAB",
    "TASK",
}
NO_NUMBERS = ["nan", "inf", "-inf", "1e400", "-1", "", " ", "x", "١٢", "9" * 5000]  # one in Arabic


def parsers():
    """Yield (name, parser) of every command and of its actions."""
    yield "minidist", _parser()
    for command in COMMANDS:
        yield from inside(command, parser_of(command))


def inside(name, parser):
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own, sub in action.choices.items():
                yield from inside(f"{name} {own}", sub)


@pytest.mark.parametrize("name, parser", [*parsers()])
def test_every_help_says_what_the_command_does_and_each_argument_is(name, parser):
    assert len(parser.format_help()) > 100 and parser.description
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), name


def arguments():
    """Return (name, action) of every argument that takes a text."""
    return [
        pytest.param(action, id=f"{name} {(action.option_strings or [action.dest])[-1]}")
        for name, parser in parsers()
        for action in parser._actions
        if action.nargs != 0 and not isinstance(action, argparse._SubParsersAction)
    ]


def refusal(read, text: str) -> str:
    """Return the error of a reader; fail if it takes the text."""
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        read(text)
    return str(caught.value)


@pytest.mark.parametrize("action", arguments())
def test_an_argument_is_a_word_or_a_number_with_a_bound_and_a_reason(action):
    if action.type in (None, str, Path):
        by_name = action.metavar in WORDS or action.dest in ("device", "command", "arguments")
        assert action.choices is not None or by_name, "is this a number? give it a reader"
        return
    assert action.type not in (int, float), "use whole() or number() of minidist/cli/options.py"
    for text in "9" * 40, "9" * 400:
        said = refusal(action.type, text)
        assert re.search(r"at most [\d,.e+]+: \w+ \w+", said), f"no bound or no reason: {said}"
    for text in NO_NUMBERS:
        assert len(refusal(action.type, text)) < 200


def test_the_error_names_option_bound_and_reason(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--model", "175b", "--ranks", "99999999999999999999"])
    assert capsys.readouterr().err.startswith(
        "minidist plan: argument --ranks: '99999999999999999999' is too large; at most 1,048,576: "
        "the search looks at every divisor of it\n"
    )


def test_bounds_are_inclusive_and_leading_zeros_do_not_count():
    read = whole(20, "so it is", least=3)
    assert [read("3"), read("20"), read("0" * 5000 + "20")] == [3, 20, 20]
    for text in "2", "21", "0", "3.0", "+3", "1_0":
        refusal(read, text)
    rate = number("a rate", 0.5, "so it is")
    assert [rate("0"), rate("0.5")] == [0, 0.5]
    assert refusal(rate, "0.6") == "'0.6' is too large; at most 0.5: so it is"
    assert refusal(number("a rate", 1, "so it is", above=True), "0") == "'0' is not a rate above 0"


def test_a_few_bytes_or_operations_are_a_forgotten_unit_and_a_latency_has_none():
    assert refusal(amount("B", "80GB"), "40") == "'40' is too small; write 40GB"
    assert refusal(amount("", "312T"), "19.5") == "'19.5' is too small; write 19.5T"
    assert amount("", "0.000005")("0.00001") == 1e-5 and amount("B", "80GB")("2000000") == 2e6
