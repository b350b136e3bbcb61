"""Which of NumPy's types of numbers are taken: of tokens and targets all integers, nothing else."""

import numpy as np
import pytest

import minidist
from minidist import Mesh, nn
from minidist.errors import is_wrong_input
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.nn.generate import translate
from minidist.nn.key_value_cache import CachedDecoder
from minidist.rng import Randomness
from minidist.tensor_parallel import vocab_parallel
from minidist.tensor_parallel.spatial_parallel import SpatialPool

TYPES = [np.dtype(c) for c in np.typecodes["All"] if c not in "SUVO"] + [np.dtype(">i4")]
INTEGERS = [kind for kind in TYPES if kind.kind in "iu"]
OTHERS = [kind for kind in TYPES if kind.kind not in "iu"]
V = 300  # of which a rank has 150: a token of uint8 minus 150 wraps round, one of int8 overflows
TOKENS = np.array([[3, 120, 7, 0], [99, 5, 127, 44]])
TARGETS = np.roll(TOKENS, -1, axis=1)
IGNORED = np.where(TARGETS == 7, nn.IGNORED, TARGETS)


def language_model():
    return nn.Transformer(V, 4, 2, 1, 4, dtype="float64")


def batches(kinds):
    for kind in kinds:
        yield Batch(TOKENS.astype(kind), TARGETS.astype(kind))
        if kind.kind == "i":
            yield Batch(TOKENS.astype(kind), IGNORED.astype(kind))


def losses_of_a_mesh(group, axes):
    trainer = Hybrid(language_model(), Mesh(group, **axes), micro_batches=1)
    losses = []
    for batch in batches(INTEGERS):
        losses.append(trainer.backward(batch))
        for p in trainer.parameters():
            p.grad = None
    return losses


@pytest.mark.parametrize("axis", ["dp", "pp", "tp", "cp"])
def test_tokens_and_targets_of_every_integer_type_have_one_loss_on_every_split(axis):
    axes = {"dp": 1, "pp": 1, "tp": 1} | {axis: 2}
    model = language_model()
    want = [model.loss(model(b.inputs), b.targets).item() for b in batches([np.dtype(int)])]
    want = [loss for kind in INTEGERS for loss in want[: 2 if kind.kind == "i" else 1]]
    for got in minidist.run(losses_of_a_mesh, 2, axes, transport="thread"):
        np.testing.assert_allclose(got, want, rtol=1e-9)


def refusals(group, kinds):
    """Of each type: what a table and the loss of a split vocabulary say, and those of one rank."""
    table, logits = nn.Embedding(V, 4), minidist.Tensor(np.zeros((2, 4, V // 2)))
    whole, part = nn.Embedding(V, 4), vocab_parallel.VocabParallelEmbedding(table, group)
    said = []
    for kind in kinds:
        x = TOKENS.astype(kind)
        for call in (
            lambda: whole(x),  # noqa: B023
            lambda: part(x),  # noqa: B023
            lambda: nn.cross_entropy(minidist.Tensor(np.zeros((2, 4, V))), x),  # noqa: B023
            lambda: vocab_parallel.cross_entropy(logits, x, group=group, vocab=V),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=f"must be integers, not {kind}") as error:
                call()
            said.append(is_wrong_input(error.value))
    return said


def test_no_other_type_of_numpy_is_taken_for_tokens_and_targets():
    for said in minidist.run(refusals, 2, OTHERS, transport="thread"):
        assert len(said) == 4 * len(OTHERS) and all(said)


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_translators_decoders_and_numbers_of_documents_take_every_integer_type(kind):
    there = nn.Seq2Seq(5, 6, 4, 2, 1, 3, 4, dtype="float64", name="there")
    dual = nn.Dual(there, nn.Seq2Seq(6, 5, 4, 2, 1, 3, 4, dtype="float64", name="back"))
    pairs, documents = np.array([[3, 4, 0, 1, 5, 2, 0]]), np.array([[0, 0, 1, 1]] * 2)
    model = language_model()

    def results(kind, listed=False):
        tokens, runs, words = (x.astype(kind) for x in (TOKENS, documents, pairs))
        if listed:
            tokens, runs, words = tokens.tolist(), runs.tolist(), words.tolist()
        randomness = Randomness(0, 0, [0, 1], documents=runs)
        yield model(tokens, randomness).data
        yield CachedDecoder(model)(tokens).data
        yield dual.loss(dual(words), dual.targets(words)).data
        yield translate(there, np.asarray(words)[:, :3], 2)
        assert Batch(TOKENS, TARGETS, documents=runs).rows([1]).documents.tolist() == [[0, 0, 1, 1]]

    for got, listed, want in zip(results(kind), results(kind, True), results(int), strict=True):
        np.testing.assert_array_equal(got, want, strict=True)
        np.testing.assert_array_equal(listed, want, strict=True)


def mean_of_rows(group):
    pool = SpatialPool(nn.AveragePool(), group, (0, 40, 64))
    return pool(np.full((1, 1, 40 - 16 * group.rank, 64), 32, "float16")).data.item()


def test_the_mean_of_an_image_whose_rows_are_cut_does_not_overflow():
    assert minidist.run(mean_of_rows, 2, transport="thread") == [32.0, 32.0]
