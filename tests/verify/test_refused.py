"""Wrong input of `certify` and `against` is a ValueError of one line that names the remedy."""

import numpy as np
import pytest

from minidist import nn, verify
from tests.strategies import arrays
from tests.verify.test_foreign import NEXTS, TOKENS, gradients, transformer
from tests.verify.test_yours import certify, majority, mlp, right, worker

MODEL, X, Y = mlp()
OURS = gradients(transformer(), TOKENS, NEXTS)


def against(got, **options):
    return verify.against(transformer(), got, TOKENS, NEXTS, **options)


def replaying(replay):
    return certify(majority, MODEL, X, Y, replay=replay)


REFUSED = {
    "misspelt option of certify": (
        lambda: certify(right, MODEL, X, Y, reply=1),
        r"certify has no option 'reply'; did you mean replay=\?",
    ),
    "misspelt option of a strategy": (
        lambda: certify("gpipe", MODEL, X, Y, microbatches=2),
        r"gpipe has no option 'microbatches'; it has .*; did you mean micro_batches\?",
    ),
    "a worker with a replay": (
        lambda: certify(worker, MODEL, X, Y, replay=len),
        r"a promise of reduce\(model, group\): write a worker as one, for after each",
    ),
    "inputs of another width": (lambda: certify(right, MODEL, X[:, :4], Y), "needs 6 columns"),
    "too few targets": (lambda: certify(right, MODEL, X, Y[:5]), "7 inputs and 5 targets"),
    "targets that are floats": (lambda: certify(right, MODEL, X, Y * 1.0), "must be integers"),
    "targets out of range": (lambda: certify(right, MODEL, X, Y + 5), "7 is outside the 3 classes"),
    "an empty batch": (lambda: certify(right, MODEL, X[:0], Y[:0]), "none of 0 targets counts"),
    "a timeout in words": (
        lambda: certify(right, MODEL, X, Y, timeout="5"),
        "a timeout is a number of seconds above 0, or None, not '5'",
    ),
    "a class for a model": (lambda: certify(right, nn.MLP, X, Y), "minidist, not the class MLP"),
    "a list for a model": (lambda: certify(right, [6, 3], X, Y), "minidist, not list"),
    "another program's model": (lambda: verify.against(OURS, OURS, X, Y), "minidist, not dict"),
    "a replay of nothing": (lambda: replaying(lambda parts: None), "is {name: array}, not NoneT"),
    "a replay of a list": (lambda: replaying(list), "is {name: array}, not list"),
    "a replay that lacks one": (
        lambda: replaying(lambda parts: {n: parts[0][n] for n in list(parts[0])[1:]}),
        "the replay lacks layers.0.weight",
    ),
    "a replay with one more": (
        lambda: replaying(lambda parts: parts[0] | {"z": X}),
        r"the replay's z\[7, 6\] is no trained parameter's",
    ),
    "a replay of numbers": (
        lambda: replaying(lambda parts: dict.fromkeys(parts[0], 1.0)),
        r"the replay's layers.0.weight\[\] is no trained parameter's",
    ),
    "an identity with one side": (
        lambda: certify(right, MODEL, X, Y, identity=lambda parts, found: parts[0]),
        "an identity returns two sides, not dict",
    ),
    "gradients of nothing": (lambda: against(None), "or a list of them, not NoneType; of PyTorch"),
    "gradients that are numbers": (lambda: against([3]), "or a list of them, not list"),
    "no gradients": (lambda: against([]), "nothing to compare"),
    "one gradient more": (
        lambda: against(OURS | {"head.norm.gian": np.ones(8)}),
        r"unknown parameter 'head.norm.gian'; did you mean head.norm.gain\?",
    ),
    "one gradient less": (
        lambda: against([OURS, {n: g for n, g in OURS.items() if n != "head.norm.gain"}]),
        "the gradient of head.norm.gain is missing on rank 1",
    ),
    "complex gradients": (
        lambda: against({n: g + 0j for n, g in OURS.items()}),
        "the gradient of embedding.token.weight is complex128, not real",
    ),
    "strings": (
        lambda: against({n: g.astype(str) for n, g in OURS.items()}),
        "the gradient of embedding.token.weight is str.*, not real",
    ),
    "a name that fits nothing": (
        lambda: against(OURS, names={"embeding.token": "wte"}),
        r"unknown name of ours 'embeding.token'; did you mean embedding.token\?",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_input_is_a_value_error_of_one_line(what):
    call, words = REFUSED[what]
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_frozen_parameters_gradient_and_running_statistics_may_be_given():
    cnn, x, y = nn.CNN(1, 3, (2,), dtype="float64"), arrays(4, 1, 4, 4), np.arange(4) % 3
    got = gradients(nn.CNN(1, 3, (2,), dtype="float64"), x, y)
    running = {n: p.data for n, p in cnn.named_parameters().items() if not p.requires_grad}
    assert running and verify.against(cnn, got | running, x, y).ok
