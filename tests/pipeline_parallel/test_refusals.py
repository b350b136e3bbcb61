"""What schedules, pipelines and texts refuse: one error, which names the fault and the remedy."""

from fractions import Fraction
from functools import partial
from math import inf, nan

import numpy as np
import pytest

from minidist import nn, optim
from minidist.comm.cluster import Cluster
from minidist.errors import CollectiveMismatch, CommError, RankFailed
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import (
    PipeDream,
    Pipeline,
    add_communication,
    add_reductions,
    branch_placement,
    programs,
    read,
    validate,
    write,
)
from minidist.pipeline_parallel.actions import Backward, Forward, Programs, SendActivation, Update
from minidist.pipeline_parallel.controllable_memory import BuildingBlock, repeated
from minidist.pipeline_parallel.executor import execute
from minidist.pipeline_parallel.partition import measured_costs, partition
from minidist.pipeline_parallel.schedules import order_of
from minidist.pipeline_parallel.text import as_text
from minidist.verify import equivalence
from tests.strategies import arrays

ONE = programs("1f1b", 2, 3)


def changed(change, made=ONE):
    made = Programs(made, made.placement)
    change(made)
    return made


def replicas_of(change):
    return changed(change, programs("pipedream", 2, 4, replicas=[2]))


def zb_auto(**options):
    return programs("zb_auto", 3, 4, **options)


def batch(inputs=np.zeros((6, 3)), targets=np.zeros(6, int), examples=None, parts=2):  # noqa: B008
    return Batch(inputs, targets, 0, 0, examples).micro_batches(parts)


REFUSED = {
    "schedules": [
        (partial(programs, "magic", 2, 2), "unknown schedule 'magic'; choose one of layer_split,"),
        (partial(programs, "gpipe", 0, 2), "one or more ranks, not 0"),
        (partial(programs, "gpipe", "2", 4), "one or more ranks, not '2'"),
        (partial(programs, "1f1b", 2, 4.0), "one or more micro-batches, not 4.0"),
        (partial(programs, "interleaved", 2, 2, 0), "one or more chunks, not 0"),
        (partial(programs, "pipedream", 9**99, 1), "forward passes, more than"),
        (partial(programs, "interleaved", 2, 2, 250_001), "1000004 forward passes, more than"),
        (partial(programs, "gpipe", 2, 2, update_every=2), "no option 'update_every'; it has"),
        (partial(programs, "interleaved", 4, 9, 2), "9 of them .* use 8"),
        (partial(programs, "interleaved_zb", 4, 9, 3), "groups of 4, one per rank: 9 of them"),
        (partial(programs, "1f1b", 2, 2, 2), "1f1b has at most 1 chunk per rank, not 2;"),
        (partial(programs, "dualpipe_v", 3, 5), "dualpipe_v needs 2 .* 6 for 3 ranks, not 5; use"),
        (
            partial(programs, "pipedream_2bw", 4, 8, update_every=2),
            "3 or more .* not update_every=2",
        ),
        (partial(programs, "pipedream", 4, 8, replicas=[2, 1]), r"\[2, 1\] .* are 3 ranks, there"),
        (partial(programs, "pipedream", 3, 8, replicas=[]), "give every stage one or more, 3 in"),
        (
            partial(programs, "pipedream", 2, 8, weights_last=True),
            "updates .* without weights_last",
        ),
        (partial(repeated, BuildingBlock(2, 1, (2, 1, 1), 1), 3, 5), "a stash of 1 is too small"),
        (partial(repeated, BuildingBlock(2, 1, (2, 1, 1), 3), 4, 5), "rank 0 has .* collide;"),
    ],
    "searched schedules": [
        (partial(zb_auto, memory=0), "no order has 0 micro-batches in flight; give memory=1 or"),
        (partial(zb_auto, memory=nan), "no order has nan micro-batches"),
        (partial(zb_auto, memory="2"), "no order has '2' micro-batches"),
        (partial(zb_auto, forward=[1, 2]), "2 durations for 3 stages; give one number, or 3"),
        (partial(zb_auto, backward_weight=-1), "a duration is a number from 0, not -1"),
        (partial(zb_auto, latency=inf), "a duration is a number from 0, not inf"),
        (partial(zb_auto, memroy=3), "zb_auto has no option 'memroy'; it has forward, .*,"),
    ],
    "programs": [
        (partial(Programs, [[], None]), "program of rank 1 is None"),
        (partial(validate, ONE, 3, 3), "there are 2 programs for 3 ranks"),
        (partial(validate, Programs(ONE, [[0]]), 2, 3), "the placement is for 1 ranks, not 2"),
        (partial(validate, Programs(ONE, [[0], [2]]), 2, 3), "no rank holds stage 1; a placement"),
        (partial(validate, [], 0, 2), "there is no program for any rank"),
        (
            partial(
                validate,
                replicas_of(lambda x: x[0].remove(Forward(2)) or x[0].remove(Backward(2))),
                2,
                4,
            ),
            "micro-batch 2 goes 0 times, not once, through stage 0",
        ),
        (
            partial(
                validate,
                replicas_of(lambda x: x[1].__setitem__(slice(0), [Forward(0), Backward(0)])),
                2,
                4,
            ),
            "micro-batch 0 goes 2 times, not once, through stage 0",
        ),
        (
            partial(validate, replicas_of(lambda x: x[1].remove(Update(1))), 2, 4),
            r"rank 1, action 5: stage 0 updates at \[3\] here, and at \[1, 3\] on rank 0",
        ),
        (
            partial(add_communication, changed(lambda x: x[1].remove(Forward(1)))),
            "rank 0, F1: no rank does F1 of stage 1",
        ),
        (partial(add_communication, add_communication(ONE)), "have their transfers already"),
        (partial(add_reductions, programs("pipedream", 2, 2)), "an update sums the gradients of"),
        (partial(order_of, ONE, 2, micro_batches=4), "these programs are of 3 micro-batches, not"),
        (partial(order_of, ONE, 2, chunks=2), r"these programs have \[1, 1\] chunks, not 2;"),
        (partial(order_of, ONE, 2, weights_last=True), "programs have no option 'weights_last';"),
        (partial(order_of, 17, 2), "a schedule is a name or a list of programs, not 17"),
    ],
    "batches and costs": [
        (partial(batch, [[1.0, 2.0, 3.0]]), "inputs are an array with a row per example, not l"),
        (partial(batch, targets=[0]), "targets are an array with a row per example, not list"),
        (partial(batch, np.array(1.0)), "inputs are an array with a row per example"),
        (partial(batch, examples=[0, 1]), r"6 inputs and indices .* shape \[2\]"),
        (partial(batch, parts=0), "1 micro-batch or more, not 0"),
        (partial(batch, targets=np.zeros(5, int)), "6 inputs and 5 targets: they must agree"),
        (partial(partition, [1, 2], 0), "cannot cut layers into 0 stages; use 1 or more"),
        (partial(partition, [1, 2, 3], 4), "cannot cut 3 layers into 4 stages; use at most 3"),
        (partial(partition, [1, nan, 1], 2), "layer 1 costs nan; a cost is a finite number from 0"),
        (partial(partition, [1, Fraction(-1, 3)], 2), "layer 1 costs -1/3; a cost is a finite"),
        (
            partial(measured_costs, nn.MLP([2, 2]), arrays(1, 2, dtype="float32"), repeats=0),
            "cannot take the median of 0 repeats; use 1 or more",
        ),
    ],
    "texts": [
        (partial(read, text + "\n"), message)
        for text, message in (
            ("rank 0 F0 X1 B0", "line 1, column 11: 'X1' is no action; write them as F3"),
            ("# mine\nrank 0 F0 >F0", r"line 2, column 11: '>F0' is a transfer; leave it out"),
            (f"rank 0 F{'9' * 5000}", "column 8: 'F9{39}...' is no action"),
            ("rank 0 F0, B0", "column 8: 'F0,' is no action; .* with spaces"),
            ("rank 0 (F0 B0", r"column 8: '\(' has no other bracket; write a pair as \(F3 B2\)"),
            ("rank 0 F0 B0)", r"column 13: '\)' has no other bracket"),
            ("rank 0 (F0 B0 W0)", r"column 8: '\(F0 B0 W0\)' is no pair; write two actions"),
            ("rank 0 F0\nrank 2 F0", "line 2, column 1: rank 1 has no line; write 'rank 1 F0"),
            ("rank 0 F0.99999999", "chunk 99999999 would be of more than 1000000 stages"),
            ("rank 0 F0\nrank 0 F0", "line 2, column 1: a second line of rank 0; make one of both"),
            ("F0 B0\nrank 0 F0", "line 1, column 1: 'F0' begins no line; begin one with 'rank 0'"),
            ("placement 0 | x\nrank 0", "line 1, column 15: 'x' is no stage; write a placement"),
            ("placement 0\nplacement 0\nrank 0", "line 2, column 1: a second placement; leave one"),
            ("placement 0 1\nrank 0\nrank 1", "line 1, .* 1 ranks have a placement, and 2 a line"),
            ("\n \n", "the text is empty; write a line per rank, such as 'rank 0 F0 B0'"),
            ("import x\ndef program(rank, p, m):", "is Python; paste it into .*, and save it as"),
            ("0F0,0F1\n1F0,1B", "line 2, column 5: '1B' is no action; write 2F0: stage, kind"),
            ("0F0;0B0\n", "column 1: '0F0;0B0' is no action; .* commas between cells"),
            ("0F0,  0SEND_F0\n", "column 7: '0SEND_F0' is a lowered step; dump with"),
            ("0F0\n,\n1F0\n", "line 2, column 1: rank 1 has no action, hence no stage; remove its"),
            ("(0F0)OVERLAP_F_B\n", r"column 1: '\(0F0\)OVERLAP_F_B' is no pair"),
        )
    ],
    "what has no text": [
        (partial(as_text, add_communication(ONE)), ">F0 is a transfer, which has no"),
        (partial(as_text, programs("pipedream", 2, 2), "torch"), "PyTorch has no word for U0;"),
        (
            partial(as_text, programs("pipedream", 2, 2, replicas=[2]), "torch"),
            "stage 0 has replicas, for",
        ),
        (partial(write, ONE, "nowhere", "csv"), "unknown format 'csv'; choose one of minidist,"),
        (partial(as_text, Programs([[Forward(0, 1)]], [[0]]), "torch"), "rank 0 has no chunk for"),
        (partial(as_text, Programs([["F0"]])), "'F0' has no text"),
        (partial(as_text, []), "no program for any rank"),
        (
            partial(as_text, Programs(ONE, ONE.placement, [(0, Forward(0), Backward(1))])),
            "rank 0: F0 and B1 are a pair, and no neighbours",
        ),
    ],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(what):
    for call, message in REFUSED[what]:
        with pytest.raises((ValueError, TypeError), match=message) as caught:
            call()
        assert what == "programs" or "\n" not in str(caught.value), message


UNUSABLE = [  # programs that nobody can run, and why
    (changed(lambda x: x[1].pop()), r"rank 1, action 4: F2 is the last .*\nrank 0"),
    (programs("1f1b", 3, 3), "there are 3 programs for 2 ranks"),
    (Programs([[], []], [[0], []]), r"rank 1 holds the stages \[\]; a rank has one or more"),
    (Programs([[], []], [[0], [-1]]), r"rank 1 holds the stages \[-1\]; .* from 0"),
    (Programs([[], []], [[0], [10**9]]), "the programs of 2 ranks have no micro-batch"),
    (programs("pipedream", 2, 3), "a program updates the weights itself, .* use PipeDream"),
]


@pytest.mark.parametrize("made, message", UNUSABLE)
def test_programs_that_cannot_be_run_are_refused_before_a_rank_starts(made, message, monkeypatch):
    def start(*arguments, **options):
        raise AssertionError("a rank started")

    monkeypatch.setattr(equivalence, "Cluster", start)
    model, x, y = nn.MLP([5, 4, 4, 3], dtype="float64"), arrays(6, 5), np.zeros(6, int)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        equivalence.gradients("pipeline", model, x, y, 2, programs=made)


def pipeline(group, **options):
    return Pipeline(nn.MLP([3, 4, 5, 2], dtype="float64"), group, **options)


def too_few_micro_batches(group):
    pipeline(group, schedule="gpipe", micro_batches=4).run(batch(parts=3))


def tokens_alone(group):
    model, tokens = nn.Transformer(7, 4, 2, 2, 3, dtype="float64"), np.zeros((4, 3), int)
    cut = [range(0), range(len(model.layers))]
    Pipeline(model, group, micro_batches=2, cut=cut).backward(Batch(tokens, tokens))


def pipedream(group, scheme, model=None, **options):
    model = model or nn.MLP([4, 3, 3])
    PipeDream(model, group, lambda parameters: optim.SGD(parameters, 0.1), scheme, **options)


def siamese(group, inputs):
    model = nn.Siamese([6, 4], dtype="float64")
    branch_placement.forward_backward(model, inputs, np.zeros(len(inputs), int), group)


def no_branches(group):
    branch_placement.own_parameters(nn.MLP([4, 4]), group)


def message_for_nobody(group):
    made = [[SendActivation(0, peer=1)], []]
    execute(made[group.rank], group, [PassThrough()])


class PassThrough:
    def output(self, i):
        return np.zeros(1)


def other_programs(group):
    later = changed(lambda x: x[0].sort(key=lambda a: a.sign, reverse=True))
    pipeline(group, schedule=later if group.rank else ONE)


def other_options(group, **options):
    options = options if group.rank else {"cut": [range(1), range(1, 3)]}
    pipeline(group, **{"schedule": "1f1b", "micro_batches": 4} | options)


CUT = [range(2), range(2, 3)]
ON_RANKS = [
    (partial(pipeline, schedule="pipedream"), "stage by stage; use PipeDream"),
    (partial(pipeline, schedule="interleaved", chunks=2), "cannot cut 3 layers into 4 stages;"),
    (partial(pipeline, cut=[range(1), range(2, 3)]), "does not cut 3 layers into 2 contiguous"),
    (partial(pipeline, cut=CUT[::-1]), "in order"),
    (partial(pipeline, weight_last=True), "1f1b has no option 'weight_last'; it has weights_last"),
    (too_few_micro_batches, "the programs are for 4 micro-batches, not 3"),
    (tokens_alone, "no gradient passes a stage of tokens alone; give it the"),
    (partial(pipedream, scheme="magic"), "unknown scheme 'magic'; choose one of weight_stashing"),
    (partial(pipedream, scheme="vertical_sync", replicas=[2]), "different minibatches: no"),
    (partial(pipedream, scheme="2bw", replicas=[2]), "2bw has no option 'replicas'; it has"),
    (partial(pipedream, scheme="2bw", update_every=1.5), "with 1 or more .* not update_every=1.5"),
    (
        partial(pipedream, scheme="none", model=nn.Transformer(7, 4, 2, 1, 3, tied=True)),
        "embedding.token.weight is shared by stages .* not tied",
    ),
    (partial(siamese, inputs=np.zeros((3, 6))), r"pairs have the shape \[B, 2, \.\.\.\], not"),
    (no_branches, r"MLP has no two branches; use an nn\.Siamese"),
    (message_for_nobody, "messages that nobody received"),
    (other_programs, r"programs [0-9a-f]{8}, 3 micro-batches"),
    (partial(other_options, cut=CUT), r"stages of \[1, 2\] layers"),
    (partial(other_options, schedule="gpipe"), r"stages of \[1, 2\] layers"),
    (partial(other_options, micro_batches=5), "1f1b, 4 micro-batches"),
]


def test_what_ranks_cannot_run_ends_in_an_error(cluster):
    for worker, message in ON_RANKS:
        with pytest.raises((RankFailed, CommError, CollectiveMismatch), match=message):
            cluster(2, "thread").run(worker, timeout=20)
    with Cluster(3, "thread") as three:
        message = "a pair has 2 branches, so 1 of 3 ranks would have nothing to run; use 1 or 2"
        with pytest.raises(RankFailed, match=message):
            three.run(siamese, np.zeros((3, 2, 6)))
