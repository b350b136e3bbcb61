"""What the command line refuses: a command's options, and the one line that it then prints."""

import re

import pytest

from minidist.cli import main

REFUSED = {
    "train --data digits --transport thread": r"""
--heads 2 -> heads is a setting of texts, not of digits; leave it out
--model llama -> model is a setting of texts, not of digits
--pp 2 -> pp is a setting of texts, not of digits
--micro-batches 2 -> micro_batches is a setting of texts, not of digits
--strategy tensor -> tp is a setting of texts, not of digits
--text x -> --text is an option of --data text, and --data digits learns images
--batch 1501 -> 1500 images are fewer than a batch of 1501
""",
    "train --transport thread": r"""
--tp 3 -> cannot split 4 heads over 3 ranks; use a multiple of 3
--kv-heads 2 -> kv_heads=2 is not for model=gpt2; use model=llama
--model llama --kv-heads 3 -> .* a number of key and value heads that divides them, not 3
--model llama --heads 6 --width 96 --kv-heads 2 --tp 3 -> cannot split 2 .*heads.* over 3 ranks
--model llama --width 20 -> width 20 needs 4 heads of an even width
--pp 5 -> cannot cut 4 layers into 5 stages; use at most 4
--ranks 3 --tp 2 -> --ranks 3 is not --dp 1 x --pp 1 x --tp 2; leave --ranks out
--ranks 2 --pp 4 -> --ranks 2 is not --dp 1 x --pp 4 x --tp 1
--ranks 8 --dp 2 --pp 2 -> --ranks 8 is not --dp 2 x --pp 2 x --tp 1
--pp 2 --micro-batches 1048576 -> a batch of 32 windows gives each of 1 data-parallel ranks at most
--tp 2 --dp 16 -> a batch of 32 windows gives each of 16 data-parallel ranks at most 2
--zero 1 --ranks 1 --batch 1000000 -> .* fewer than a batch of 1000000
--pp 3 --schedule zb_v -> cannot cut 4 layers into 6 stages; use at most 4
--cp 9 --context 8 -> cannot cut 8 positions over 9 ranks; use at least 9
--ep 3 --dp 4 --experts 3 -> ep=3 does not divide dp=4; use a divisor of it
--ep 2 -> ep=2 ranks cannot share 0 experts; use experts=2 or more
--ranks 4 --cp 3 --context 64 -> --ranks 4 is not --dp 1 x --pp 1 x --cp 3 x --tp 1; leave --ranks
--zero 2 --tied -> 'embedding.token.weight' belongs to several layers, and zero=2 on a mesh keeps
--zero 3 --pp 2 --schedule zb_h1 -> zero=3 sums a layer's gradient when backward leaves the layer
--zero 1 --batch 2 -> a batch of 2 windows gives each of 4 data-parallel ranks at most 1, too few
""",
    "train --servers 1": r"""
--staleness 0 --push-every 2 -> n_fetch, n_push and local_lr are Downpour's
--pp 2 -> servers keep whole float32 weights for workers that split the batch alone
--tp 2 -> servers keep whole float32 weights for workers that split the batch alone
--cp 2 -> servers keep whole float32 weights for workers that split the batch alone
--schedule gpipe -> --servers and --schedule do not go together: no worker has a
--micro-batches 2 -> --servers and --micro-batches do not go together
--quorum 4 -> quorum=4 of 3 workers is never reached; use 3 or fewer, or 5 ranks
--zero 1 -> servers keep whole float32 weights
--dp 4 -> --servers and --dp do not go together: .* use --ranks
--elastic -> --servers and --elastic do not go together: the weights of a server
--resume -> --servers and --resume do not go together: resume without servers
--every 2 -> --servers and --every do not go together: a checkpoint is made at
--precision float16 -> servers keep whole float32 weights
--optimizer muon -> servers keep whole float32 weights
--data digits -> stem.norm moves its running statistics on the worker that uses them
--staleness 1 --push-every 2 -> n_fetch, n_push and local_lr are Downpour's
--quorum 1 --fetch-every 2 -> n_fetch, n_push and local_lr are Downpour's
--servers 4 -> 4 servers on 4 ranks leave no worker; use 5 ranks or more
""",
    "train --data numbers --transport thread": r"""
--context 8 -> context is a setting of texts, not of numbers; leave it out
--tied -> tied is a setting of texts, not of numbers
--experts 2 -> experts is a setting of texts, not of numbers
--ranks 2 --cp 2 -> cp is a setting of texts, not of numbers
--text x -> --text is an option of --data text, and
--reconstruction 0.5 --ranks 2 --pp 2 -> two translators with reconstruction are trained by
--reconstruction 0.5 --strategy zero_1 -> two translators with reconstruction are trained by
--reconstruction 0.5 --precision float16 -> two translators with reconstruction are trained by
--reconstruction 0.5 --servers 1 -> servers keep whole float32 weights
--reconstruction 1 --strategy downpour -> servers keep whole float32 weights
--reconstruction 1 --data text -> reconstruction is a setting of numbers, not of texts; leave it out
--reconstruction 1 --data digits -> reconstruction is a setting of numbers, not of dig
--batch 20001 -> numbers, en-zh by words: 20000 pairs are fewer than a batch of 20001
--data text --by words -> --by is an option of --data numbers, and --data text le
--data digits --direction en-zh -> --direction is an option of --data numbers
--strategy naive --pp 2 -> --strategy naive on 4 ranks has pp=1, not 2; leave --pp or --strategy
--strategy gpipe --schedule 1f1b -> --strategy gpipe on 4 ranks has schedule=gpipe, not 1f1b
--strategy zero_1 --zero 0 -> --strategy zero_1 on 4 ranks has zero=1, not 0
--strategy tensor --ranks 2 --tp 4 -> --strategy tensor on 2 ranks has tp=2, not 4
--strategy hybrid --cp 2 -> --strategy hybrid on 4 ranks has cp=1, not 2
--strategy 1f1b --ranks 9 -> cannot cut 6 layers into 9 stages; use at most 6
--strategy downpour --pp 2 -> --strategy downpour on 4 ranks has pp=1, not 2; leave --pp
--strategy downpour --dp 4 -> --servers and --dp do not go together: the workers share
--strategy downpour --data digits -> stem.norm moves its running statistics on the worker
--strategy downpour --staleness 0 -> --strategy downpour on 4 ranks has staleness=None, not 0; leave
--strategy downpour --servers 2 --quorum 2 -> --strategy downpour on 4 ranks has quorum=None, not 2
--strategy downpour --ranks 1 -> 1 servers on 1 ranks leave no worker; use 2 ranks or more
--strategy naive --servers 1 -> --strategy naive on 4 ranks has servers=None, not 1; leave --servers
--strategy 1f1b --staleness 2 -> --staleness says how servers are used; add --servers 1
--strategy zero_1 --replay -> --replay says how servers are used; add --servers 1
""",
    "train": r"""
--elastic -> --elastic needs --checkpoint FOLDER, to go on from
--elastic --checkpoint x --transport thread -> --elastic needs --transport process, not thread
--staleness 0 -> --staleness says how servers are used; add --servers 1
--quorum 2 -> --quorum says how servers are used; add --servers 1
--push-every 2 -> --push-every says how servers are used; add --servers 1
--sparse -> --sparse says how servers are used; add --servers 1
--replay -> --replay says how servers are used; add --servers 1
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
--published --batch 9 -> --published does not use --batch; leave it out
--model 124m --bandwidth 9 -> --model does not use --bandwidth; leave it out
--profile --batch 9 -> --profile does not use --batch; leave it out
""",
    "timeline": r"""
--chunks 2 -> 1f1b has at most 1 chunk per rank, not 2; interleaved
--schedule zb_v --chunks 3 -> zb_v has at most 2 chunks per rank
--forward 1,2 -> 2 durations for 4 ranks with 4 virtual stages
--pp 1000 --micro-batches 20000 -> 1000 stages and 20000 micro-batches make 20000000 forward passes,
gpipe --schedule 1f1b -> gpipe and --schedule 1f1b; leave one of them out
--out a.gif -> a timeline is a file \*.txt, .*, not 'a.gif'
--out /nowhere/a.png -> cannot write '/nowhere/a.png': there is no
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
ROWS = [
    (f"{command} {options}", message)
    for command, table in REFUSED.items()
    for options, message in re.findall(r"^(.+) -> (.+)$", table, re.M)
]


@pytest.mark.parametrize("command, message", ROWS, ids=[command for command, _ in ROWS])
def test_wrong_input_is_one_line_and_exit_status_2(capsys, command, message):
    assert main(command.split()) == 2
    printed = capsys.readouterr()
    assert re.match(f"minidist: .*{message}", printed.err) and printed.err.count("\n") == 1


def test_every_row_is_tried():
    assert len(ROWS) == sum(table.count("\n") - 1 for table in REFUSED.values())
