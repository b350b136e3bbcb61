"""What the command line refuses: a number has a bound, and an error is a line with its reason."""

import argparse
import re
from pathlib import Path

import pytest

from minidist.cli import COMMANDS, main, parser_of
from minidist.cli.options import number, whole
from minidist.cli.plan import amount

REFUSED = {
    "train --data digits --transport thread": r"""
--heads 2 -> heads is a setting of texts, not of digits; leave it out
--strategy tensor -> tp is a setting of texts, not of digits
""",
    "train --transport thread": r"""
--tp 3 -> cannot split 4 heads over 3 ranks; use a multiple of 3
--kv-heads 2 -> kv_heads=2 is not for model=gpt2; use model=llama
--model llama --kv-heads 3 -> .* a number of key and value heads that divides them, not 3
--pp 5 -> cannot cut 4 layers into 5 stages; use at most 4
--ranks 3 --tp 2 -> --ranks 3 is not --dp 1 x --pp 1 x --tp 2; leave --ranks out
--pp 2 --micro-batches 1048576 -> a batch of 32 windows gives each of 1 data-parallel ranks at most
--zero 1 --ranks 1 --batch 1000000 -> .* fewer than a batch of 1000000
--cp 9 --context 8 -> cannot cut 8 positions over 9 ranks; use at least 9
--ep 3 --dp 4 --experts 3 -> ep=3 does not divide dp=4; use a divisor of it
--ep 2 -> ep=2 ranks cannot share 0 experts; use experts=2 or more
--zero 2 --tied -> 'embedding.token.weight' belongs to several layers, and zero=2 on a mesh keeps
--zero 3 --pp 2 --schedule zb_h1 -> zero=3 sums a layer's gradient when backward leaves the layer
""",
    "train --servers 1": r"""
--staleness 0 --push-every 2 -> n_fetch, n_push and local_lr are Downpour's
--pp 2 -> servers keep whole float32 weights for workers that split the batch alone
--micro-batches 2 -> --servers and --micro-batches do not go together
--quorum 4 -> quorum=4 of 3 workers is never reached; use 3 or fewer, or 5 ranks
--elastic -> --servers and --elastic do not go together: the weights of a server
--optimizer muon -> servers keep whole float32 weights
--data digits -> stem.norm moves its running statistics on the worker that uses them
--servers 4 -> 4 servers on 4 ranks leave no worker; use 5 ranks or more
""",
    "train --data numbers --transport thread": r"""
--context 8 -> context is a setting of texts, not of numbers; leave it out
--reconstruction 0.5 --ranks 2 --pp 2 -> two translators with reconstruction are trained by
--reconstruction 1 --data text -> reconstruction is a setting of numbers, not of texts; leave it out
--batch 20001 -> numbers, en-zh by words: 20000 pairs are fewer than a batch of 20001
--data text --by words -> --by is an option of --data numbers, and --data text le
--strategy naive --pp 2 -> --strategy naive on 4 ranks has pp=1, not 2; leave --pp or --strategy
--strategy downpour --pp 2 -> --strategy downpour on 4 ranks has pp=1, not 2; leave --pp
--strategy downpour --data digits -> stem.norm moves its running statistics on the worker
""",
    "train": r"""
--elastic -> --elastic needs --checkpoint FOLDER, to go on from
--elastic --checkpoint x --transport thread -> --elastic needs --transport process, not thread
--staleness 0 -> --staleness says how servers are used; add --servers 1
--text /nowhere -> cannot read the text '/nowhere': No such file
--batch 100000 -> the help topics of Python: 7[0-9]{3} windows are fewer than a batch of 100000
--heads 5 -> width 64 does not split into 5 heads
--lr 1e30 -> the loss is nan at step
--log no/run.csv -> cannot write the log 'no/run.csv': there is no folder 'no'
""",
    "plan": r"""
--profile --sequence 4096 -> --profile has its arrays in memory; use --sequence 2048
--layers 3 --width 64 -> give --model NAME, or the sizes of a model: --heads
--model 13B -> unknown model '13B'; did you mean 13b\? Choose one of 124m
--model 124m --heads 7 -> width 768 does not split into 7 heads; use a multiple of 7
--model 124m --efficiency 64:0.5,8:0.6 -> efficiency rises with the dimension
--model 124m --bandwidth 9 -> --model does not use --bandwidth; leave it out
""",
    "timeline": r"""
--chunks 2 -> 1f1b has at most 1 chunk per rank, not 2; interleaved
--forward 1,2 -> 2 durations for 4 ranks with 4 virtual stages
--pp 1000 --micro-batches 20000 -> 1000 stages and 20000 micro-batches make 20000000 forward passes,
gpipe --schedule 1f1b -> gpipe and --schedule 1f1b; leave one of them out
--out a.gif -> a timeline is a file \*.txt, .*, not 'a.gif'
--schedule 1f1b --memory 2 -> 1f1b has no option 'memory'
--measured --backward-input 2 -> .* leave --backward-input out
--dp 2 -> a simulation has one copy of a pipeline; add --measured, or
--schedule pipedream --reduce 1 -> these programs update the w
--device gpu -> a simulation needs no device; add --measured, or leave --device out
""",
    "bench": r"""
comm --ranks 4 -> comm has ranks of its own; leave --ranks
step --width 8 -> the sizes of step are fixed; leave --width out
""",
}


@pytest.mark.parametrize("command", REFUSED)
def test_wrong_input_is_one_line_and_exit_status_2(capsys, command):
    rows = REFUSED[command].strip().splitlines()
    for options, message in (row.split(" -> ") for row in rows):
        assert main([*command.split(), *options.split()]) == 2, options
        error = capsys.readouterr().err
        assert re.match(f"minidist: .*{message}", error) and error.count("\n") == 1, error


MISSPELLED = {  # what argparse refuses, and a part of the error
    "train --ranks 0": "'0' is not a whole number from 1",
    "train --steps x": "'x'",
    "train --pp 2 --schedule pipedream": "pipedream",
    "translate --checkpoint . --beam 0": "",
    "timeline --latency 1/0": "'1/0' is not a time",
    "timeline --latency 1,2": "'1,2' is not a time",
    "plan --profile --bandwidth 0": "",
    "bench -q": "",
    "dance": "",
    "trian": "; did you mean train?",
    "train --rank 2": "; did you mean --ranks?",
    "timeline --micro 2": "unknown option --micro; did you mean --micro-batches?",
    "train --micro_batches=2": "; did you mean --micro-batches?",
    "train --schedule Gpip": "; did you mean gpipe?",
    "timeline zbv": "; did you mean zb_v?",
    "verify naive": "; did you mean --strategy naive?",
    "lab tset": "; did you mean test?",
    "plan --model 175b --ranks 99999999999999999999": "argument --ranks: '99999999999999999999' is "
    "too large; at most 1,048,576: the search looks at every divisor of it",
}


def test_wrong_arguments_are_two_lines_the_second_of_which_names_the_help(capsys):
    for line, words in MISSPELLED.items():
        with pytest.raises(SystemExit) as caught:
            main(line.split())
        error, remedy = capsys.readouterr().err.splitlines()
        assert caught.value.code == 2 and re.match("minidist[a-z ]*: ", error) and words in error
        assert re.fullmatch(r"`minidist[a-z ]* --help` describes what it takes", remedy)


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
    for command in COMMANDS:
        yield from inside(command, parser_of(command))


def inside(name, parser):
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own, sub in action.choices.items():
                yield from inside(f"{name} {own}", sub)


def refusal(read, text: str) -> str:
    """Return the error of a reader; fail if it takes the text."""
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        read(text)
    return str(caught.value)


def test_an_argument_is_a_word_or_a_number_with_a_bound_and_a_reason_and_has_a_help():
    for name, parser in parsers():
        assert len(parser.format_help()) > 100 and parser.description
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            assert action.help, (name, action.dest)
            if action.nargs == 0:
                continue
            if action.type in (None, str, Path):
                word = action.metavar in WORDS or action.dest in ("device", "command", "arguments")
                assert action.choices is not None or word, "is this a number? give it a reader"
                continue
            assert action.type not in (int, float), "use whole() or number() of cli/options.py"
            for text in "9" * 40, "9" * 400:
                said = refusal(action.type, text)
                assert re.search(r"at most [\d,.e+]+: \w+ \w+", said), f"no bound: {said}"
            for text in NO_NUMBERS:
                assert len(refusal(action.type, text)) < 200


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
