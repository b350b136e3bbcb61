"""The encoder-decoder: what its layers compute, what each position reads, and what padding is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor, decoding, nn, no_grad, optim
from minidist.backend import to_host
from minidist.course.register import find
from minidist.nn.seq2seq import joined, parted
from minidist.rng import Randomness
from minidist.tokens import BEGIN, PAD
from minidist.tools import equivalence
from minidist.tools.strategies.cases import Case, random_weights
from tests.nn.differences import assert_gradients_are_differences
from tests.planted import planted
from tests.strategies import (
    arrays,
    assert_same_bits,
    gradients,
    seeds,
    sentences,
    translators,
    watch_dtypes,
)


def small(dropout=0.0, dtype="float64", depth=2, S=4, T=3, seed=0):
    return nn.Seq2Seq(7, 6, 4, 2, depth, S, T, seed, dtype, dropout)


def differing(model, tokens, changed):
    """Return which [b, t] have other logits; those that should be equal have the same bits."""
    return (model(changed).data != model(tokens).data).any(axis=-1)


@given(model=translators(), data=st.data())
def test_no_logits_depend_on_a_later_target_token(model, data):
    tokens = data.draw(sentences(model))
    t = data.draw(st.integers(0, model.target_length - 1))
    changed = tokens.copy()
    changed[:, model.source_length + t] += 1
    changed[:, model.source_length + t] %= model.vocab
    early = differing(model, tokens, changed)[:, :t]
    assert not early.any(), (
        f"the decoder looks ahead: target token {t} changes the logits of positions "
        f"{np.flatnonzero(early.any(axis=0)).tolist()}, before it"
    )


@given(model=translators(), data=st.data(), more=st.integers(1, 4))
def test_how_far_a_source_is_padded_does_not_matter(model, data, more):
    S, tokens = model.source_length, data.draw(sentences(model))
    width = model.layers[0].source.token.weight.shape[1]
    heads, depth = model.layers[1].attention.heads, (len(model.layers) - 2) // 2
    longer = nn.Seq2Seq(
        model.source_vocab, model.vocab, width, heads, depth, S + more, model.target_length, 1,
        "float64",
    )  # fmt: skip
    state, name = model.state(), "embedding.source.position.weight"
    longer.load_state(state | {name: np.concatenate([state[name], np.ones((more, width))])})
    padded = np.insert(tokens, [S] * more, PAD, axis=1)
    got, want = longer(padded).data, model(tokens).data
    off = abs(got - want).max()
    assert off < 1e-9, (
        f"keys of padding are attended to: {more} more columns of PAD change the logits "
        f"by {off:.1e}"
    )


@pytest.mark.parametrize(
    "name, test",
    [
        ("decoder_looks_ahead", test_no_logits_depend_on_a_later_target_token),
        ("padding_attended_to", test_how_far_a_source_is_padded_does_not_matter),
    ],
)
def test_a_wrong_model_is_found_and_the_cause_is_named(name, test):
    with planted(name), pytest.raises(AssertionError, match=find(name).diagnosis):
        test()


@given(model=translators(), data=st.data())
def test_layers_composed_by_hand_are_the_model(model, data):
    tokens = data.draw(sentences(model))
    x = tokens
    for layer in model.layers:
        x = layer(x)
    np.testing.assert_array_equal(model(tokens).data, x.data)
    assert x.shape == (len(tokens), model.target_length, model.vocab)
    depth = (len(model.layers) - 2) // 2
    kinds = [type(layer) for layer in model.layers]
    blocks = depth * [nn.EncoderBlock] + depth * [nn.DecoderBlock]
    assert kinds == [nn.SourceAndTarget, *blocks, nn.Head]


def test_attention_has_its_heads_side_by_side_and_keys_before_values():
    layer = nn.PaddedAttention(6, 3, dtype="float64")
    for p in layer.parameters():
        p.data[...] = arrays(*p.shape, seed=len(p.name))
    x, memory = arrays(2, 4, 6), arrays(2, 5, 6, seed=1)
    q = layer.query(Tensor(x)).data
    k, v = np.split(layer.key_value(Tensor(memory)).data, 2, axis=-1)
    heads = []
    for h in (slice(0, 2), slice(2, 4), slice(4, 6)):
        p = np.exp(np.einsum("btd,bsd->bts", q[..., h], k[..., h]) / np.sqrt(2))
        heads.append(p / p.sum(axis=-1, keepdims=True) @ v[..., h])
    want = layer.output(Tensor(np.concatenate(heads, axis=-1))).data
    got = layer(Tensor(x), Tensor(memory), np.ones((2, 5), bool)).data
    np.testing.assert_allclose(got, want, rtol=1e-9)


def feed_forward(block, norm, x):
    return block.contract(block.expand(norm(x))).data


def with_padding(x):
    """Return X[2, 3 + t, C] as a block takes it: the last source word of example 1 is padding."""
    held = np.array([[True] * 3, [True, True, False]])
    return joined(Tensor(x[:, :3]), held, Tensor(x[:, 3:]))


def test_an_encoder_block_mixes_the_source_and_leaves_the_target_alone():
    block = nn.EncoderBlock(4, 2, 3, name="encoder.0", seed=0, dtype="float64")
    x = arrays(2, 5, 4)
    got = parted(block(with_padding(x)), 3)
    np.testing.assert_array_equal(got[1], [[True] * 3, [True, True, False]])
    for b, s in ((0, 3), (1, 2)):  # each sentence by itself, without its padding
        h = block.norm_1(Tensor(x[b : b + 1, :s]))
        x1 = x[b : b + 1, :s] + block.attention(h, h, np.ones((1, s), bool)).data
        want = x1 + feed_forward(block, block.norm_2, Tensor(x1))
        np.testing.assert_allclose(got[0].data[b : b + 1, :s], want, rtol=1e-12)
    np.testing.assert_array_equal(got[2].data, x[:, 3:])


@pytest.mark.parametrize("last", [False, True])
def test_a_decoder_block_reads_itself_then_the_source_and_leaves_that_alone(last):
    block = nn.DecoderBlock(4, 2, 3, last=last, name="decoder.0", seed=0, dtype="float64")
    x = arrays(2, 5, 4)
    whole = with_padding(x)
    got = block(whole).data
    if not last:
        np.testing.assert_array_equal(got[:, :3], whole.data[:, :3])
        got = parted(Tensor(got), 3)[2].data
    for b, s in ((0, 3), (1, 2)):
        source, y = Tensor(x[b : b + 1, :s]), x[b : b + 1, 3:]
        y = y + block.attention(block.norm_1(Tensor(y))).data
        read = block.cross(
            block.norm_2(Tensor(y)), block.norm_source(source), np.ones((1, s), bool)
        )
        y = y + read.data
        y = y + feed_forward(block, block.norm_3, Tensor(y))
        np.testing.assert_allclose(got[b : b + 1], y, rtol=1e-12)


def test_a_target_token_changes_its_own_and_all_later_logits():
    model = small(T=4)
    tokens = np.array([[3, 4, 5, PAD, BEGIN, 3, 4, 5]])
    for t in range(4):
        changed = tokens.copy()
        changed[0, 4 + t] = 0
        assert differing(model, tokens, changed)[0].tolist() == [t <= i for i in range(4)]


def test_fewer_target_tokens_give_the_first_logits():
    model, tokens = small(), np.array([[3, 4, 5, PAD, BEGIN, 3, 4]])
    np.testing.assert_allclose(model(tokens[:, :-1]).data, model(tokens).data[:, :2], rtol=1e-12)


@given(model=translators(), data=st.data(), seed=seeds)
def test_teacher_forcing_is_what_step_by_step_writing_reads(model, data, seed):
    S, tokens = model.source_length, data.draw(sentences(model))
    logits = model(tokens).data
    want = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    with no_grad():
        memory = decoding.encode(model, tokens[:, :S])
        for t in range(model.target_length):
            got = decoding.next_words(model, memory, tokens[:, S : S + t + 1])
            np.testing.assert_allclose(
                got, want[:, t], rtol=1e-9, err_msg=f"word {t} has other odds when it is written"
            )


@given(model=translators(), data=st.data())
def test_every_layer_passes_on_what_is_padding_and_padding_gets_no_gradient(model, data):
    tokens = data.draw(sentences(model))
    S = model.source_length
    words = np.pad(tokens[:, :S] != PAD, ((0, 0), (0, model.target_length)))
    embedded = x = Tensor(model.layers[0](tokens).data, requires_grad=True)
    for layer in model.layers[1:-2]:  # the last block of the decoder drops the source
        np.testing.assert_array_equal(x.data[..., -1], words)
        x = layer(x)
    for layer in model.layers[-2:]:
        x = layer(x)
    (x * arrays(*x.shape)).sum().backward()
    assert not embedded.grad[:, :S][~words[:, :S]].any()
    assert not embedded.grad[..., -1].any()


@given(model=translators(), data=st.data())
def test_what_the_tables_hold_for_padding_changes_no_bit(model, data):
    S, tokens = model.source_length, data.draw(sentences(model))
    embedding = model.layers[0].source
    want = model(tokens).data
    embedding.token.weight.data[PAD] = 1e3
    unused = (tokens[:, :S] == PAD).all(axis=0)
    embedding.position.weight.data[unused] = -1e3
    np.testing.assert_array_equal(model(tokens).data, want)
    (model(tokens) * arrays(*want.shape)).sum().backward()
    assert not embedding.token.weight.grad[PAD].any()
    assert not embedding.position.weight.grad[unused].any()


def test_every_source_token_matters_to_every_position_of_source_and_target():
    model, tokens = small(depth=1), np.array([[3, 4, 5, PAD, BEGIN, 3, 4]])
    encode, states = model.layers[:2], {}
    for s in range(-1, 3):
        changed = tokens.copy()
        if s >= 0:
            changed[0, s] = 6
            assert differing(model, tokens, changed).all()
        x = changed
        for layer in encode:
            x = layer(x)
        states[s] = x.data[0, :3]
    for s in range(3):  # in both directions: tokens after it, and before it
        assert (states[s] != states[-1]).any(axis=-1).all()
    order = tokens.copy()
    order[0, :3] = order[0, 2::-1]
    assert differing(model, tokens, order).all()


def test_an_example_does_not_depend_on_the_others_of_its_batch():
    model = small()
    tokens = np.array([[3, 4, 5, 6, BEGIN, 3, 4], [3, PAD, PAD, PAD, BEGIN, 5, 3]])
    whole = model(tokens).data
    for b in range(2):
        np.testing.assert_allclose(model(tokens[[b]]).data, whole[[b]], rtol=1e-12)


def test_an_empty_source_is_read_as_nothing():
    """The decoder is then a language model whose cross-attention adds its output's bias."""
    model = small()
    tokens = np.array([[PAD] * 4 + [BEGIN, 3, 4]])
    logits = model(tokens)
    logits.sum().backward()
    assert np.isfinite(logits.data).all()
    for name, p in model.named_parameters().items():
        assert np.isfinite(p.grad).all(), name
        if name.startswith(("embedding.source", "encoder")):
            assert not p.grad.any(), name
    for p in model.layers[0].source.parameters():
        p.data += 1
    np.testing.assert_array_equal(model(tokens).data, logits.data)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_all_parameters_are_differences(dropout):
    model = small(dropout)
    for p in model.parameters():
        p.data[...] += 0.1 * arrays(*p.shape, seed=3)  # biases and gains too
    tokens = np.array([[3, 4, 5, 6, BEGIN, 3, 4], [6, 5, PAD, PAD, BEGIN, 5, PAD]])
    targets = np.array([[3, 4, 2], [5, 2, 0]])
    randomness = Randomness(0, 0, np.arange(2))
    assert_gradients_are_differences(
        model, lambda: nn.cross_entropy(model(tokens, randomness), targets)
    )


@given(model=translators(dropout=(0.3,)), data=st.data(), seed=seeds)
def test_dropout_is_the_examples_own_on_any_split_of_a_batch(model, data, seed):
    tokens = data.draw(sentences(model))
    examples = 5 + np.arange(len(tokens))
    whole = model(tokens, Randomness(seed, 2, examples)).data
    np.testing.assert_array_equal(model(tokens, Randomness(seed, 2, examples)).data, whole)
    for b in range(len(tokens)):
        part = model(tokens[[b]], Randomness(seed, 2, examples[[b]])).data
        np.testing.assert_allclose(part, whole[[b]], rtol=1e-9, atol=1e-12)


def test_training_with_dropout_needs_randomness_and_evaluation_does_not():
    model, tokens = small(0.5), np.array([[3, 4, 5, PAD, BEGIN, 3, 4]])
    with pytest.raises(ValueError, match=r"embedding\.source\.dropout drops out at 0\.5"):
        model(tokens)
    with no_grad():
        np.testing.assert_array_equal(model(tokens).data, small()(tokens).data)


def test_every_dropout_layer_has_a_mask_of_its_own_and_is_used_once(monkeypatch):
    model = small(0.5)
    parts = [module for layer in model.layers for module in vars(layer).values()]
    parts += [model.layers[0].source.dropout, model.layers[0].target.dropout]
    drops = [part for part in parts if isinstance(part, nn.Dropout)]
    randomness = Randomness(0, 0, np.arange(4))
    masks = {drop(Tensor(np.ones((4, 30))), randomness).data.tobytes() for drop in drops}
    assert len(masks) == len(drops) == 2 + 2 * 2 + 3 * 2
    used = []
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x, _: used.append(self.name) or x)
    model(np.array([[3, 4, 5, PAD, BEGIN, 3, 4]]), randomness)
    assert sorted(used) == sorted(drop.name for drop in drops)


def by_hand(model, tokens, randomness):
    """Return the logits of a Seq2Seq in NumPy; what is padding is read from the tokens."""
    from_tokens = tokens[:, : model.source_length] != PAD
    state = model.state()

    def dropped(x, name):
        return x * randomness.keep(name, 0.5, x.shape) / 0.5

    def linear(x, name):
        return x @ state[f"{name}.weight"] + state[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * state[f"{name}.gain"] + state[f"{name}.bias"]

    def mixed(q, k, v, seen):
        heads = []
        for h in (slice(0, 2), slice(2, 4)):  # width 4 is two heads
            p = np.exp(q[..., h] @ k[..., h].swapaxes(1, 2) / np.sqrt(2)) * seen
            heads.append(p / np.maximum(p.sum(-1, keepdims=True), 1e-300) @ v[..., h])
        return np.concatenate(heads, axis=-1)

    def read(x, memory, name):
        k, v = np.split(linear(memory, f"{name}.key_value"), 2, axis=-1)
        seen = from_tokens[:, None, :]
        return linear(mixed(linear(x, f"{name}.query"), k, v, seen), f"{name}.output")

    def feed_forward(x, name):
        u = linear(x, f"{name}.expand")
        u = u / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
        return linear(u, f"{name}.contract")

    def embedded(tokens, name):
        x = state[f"{name}.token.weight"][tokens]
        return dropped(x + state[f"{name}.position.weight"][: x.shape[1]], f"{name}.dropout")

    x = embedded(tokens[:, : model.source_length], "embedding.source")
    y = embedded(tokens[:, model.source_length :], "embedding.target")
    earlier = np.tril(np.ones((y.shape[1], y.shape[1])))
    for i in range((len(model.layers) - 2) // 2):
        at = f"encoder.{i}"
        h = norm(x, f"{at}.norm_1")
        x = x + dropped(read(h, h, f"{at}.attention"), f"{at}.dropout_1")
        x = x + dropped(feed_forward(norm(x, f"{at}.norm_2"), at), f"{at}.dropout_2")
    for i in range((len(model.layers) - 2) // 2):
        at = f"decoder.{i}"
        qkv = np.split(linear(norm(y, f"{at}.norm_1"), f"{at}.attention.qkv"), 3, axis=-1)
        y = y + dropped(linear(mixed(*qkv, earlier), f"{at}.attention.output"), f"{at}.dropout_1")
        source = norm(x, f"{at}.norm_source")
        crossed = read(norm(y, f"{at}.norm_2"), source, f"{at}.cross")
        y = y + dropped(crossed, f"{at}.dropout_2")
        y = y + dropped(feed_forward(norm(y, f"{at}.norm_3"), at), f"{at}.dropout_3")
    return norm(y, "head.norm") @ state["head.linear.weight"]


def narrow_case(examples=60):
    """A Seq2Seq of width 4 with dropout 0.5, which drops all 4 numbers of one source word in 16."""
    model = random_weights(small(0.5))
    tokens = np.random.default_rng(0).integers(3, 6, (examples, 7))
    tokens[:, 4] = BEGIN
    tokens[1::3, 2:4] = PAD
    tokens[2::3, :4] = PAD  # an empty source
    return Case("narrow", model, tokens, tokens[:, 4:])


def test_a_source_word_that_dropout_drops_whole_is_still_a_word():
    case = narrow_case()
    model, tokens, randomness = case.model, case.inputs, Randomness(0, 0, np.arange(60))
    words, x = tokens[:, :4] != PAD, model.layers[0](tokens, randomness).data[:, :4, :4]
    assert (words & ~x.any(axis=-1)).sum() > 4  # dropped whole
    got = model(tokens, randomness).data
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, by_hand(model, tokens, randomness), rtol=1e-9)


@pytest.mark.parametrize(
    "strategy, options",
    [
        ("gpipe", {"micro_batches": 3}),
        ("zb_v", {"chunks": 2}),
        ("pipeline", {"recompute": True}),
        ("attention", {}),
        ("hybrid", {"tp": 2}),
        ("hybrid", {"pp": 2}),
    ],
)
def test_every_rank_knows_a_dropped_word_from_padding(cluster, strategy, options):
    """By differences of the loss in NumPy: no stage but the first sees the tokens."""
    case, randomness = narrow_case(), Randomness(0, 0, np.arange(60))
    ranks = cluster(2, "thread")
    names = "embedding.source.token.weight", "encoder.0.attention.key_value.weight"
    outcome = equivalence.gradients(
        strategy, case.model, case.inputs, case.targets, 2, cluster=ranks, **options
    )

    def loss():
        return nn.cross_entropy(
            Tensor(by_hand(case.model, case.inputs, randomness)), case.targets
        ).item()

    for name in names:
        p, direction = case.model.named_parameters()[name], arrays(*outcome[name].shape)
        start, ends = p.data.copy(), []
        for step in (1e-5, -1e-5):
            p.data[...] = start + step * direction
            ends.append(loss())
        p.data[...] = start
        want = (ends[0] - ends[1]) / 2e-5
        assert (outcome[name] * direction).sum() == pytest.approx(want, rel=1e-6), name


@given(model=translators(dropout=(0.0, 0.3)), data=st.data())
def test_deferred_gradients_have_the_same_bits(model, data):
    tokens, results = data.draw(sentences(model)), []
    randomness = Randomness(0, 0, np.arange(len(tokens)))
    for thunks in (None, []):
        for p in model.parameters():
            p.grad = None
        logits = model(tokens, randomness)
        nn.cross_entropy(logits, tokens[:, model.source_length :]).backward(deferred=thunks)
        for thunk in thunks or []:
            thunk()
        results.append(gradients(model))
    assert_same_bits(*results)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_training_step_keeps_its_dtype(dtype, device):
    model = small(0.2, dtype).to(device)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    tokens = np.array([[3, 4, 5, 6, BEGIN, 3, 4], [6, 5, PAD, PAD, BEGIN, 5, PAD]])
    before = model.state()
    with watch_dtypes() as dtypes:
        logits = model(tokens, Randomness(0, 0, np.arange(2)))
        nn.cross_entropy(logits, np.array([[3, 4, 2], [5, 2, 0]])).backward()
    assert dtypes == {np.dtype(dtype)}
    optimizer.step()
    for p in model.parameters():
        assert p.dtype == p.grad.dtype == dtype
        assert np.isfinite(to_host(p.data)).all(), p.name
        assert (to_host(p.data) != before[p.name]).any(), p.name


def test_half_and_single_precision_are_near_double_precision(device):
    model = small()
    tokens = np.array([[3, 4, 5, 6, BEGIN, 3, 4], [6, 5, PAD, PAD, BEGIN, 5, PAD]])
    want = model(tokens).data
    for dtype, bound in [("float64", 1e-12), ("float32", 1e-5), ("float16", 1e-2)]:
        got = model.astype(dtype).to(device)(tokens).data
        assert abs(to_host(got) - want).max() < bound * abs(want).max()


@pytest.mark.parametrize(
    "tokens, message",
    [
        (np.zeros((1, 4), int), r"4 columns of the source, then at least one .* not \[1, 4\]"),
        (np.zeros(7, int), r"tokens are \[B, S \+ t\]: .*; not \[7\]"),
        (np.zeros((1, 8), int), "4 tokens do not fit a context of 3"),
        (np.array([[7, 0, 0, 0, 1]]), "token 7 is outside a vocabulary of 7"),
        (np.array([[6, 0, 0, 0, 6]]), "token 6 is outside a vocabulary of 6"),
    ],
)
def test_tokens_that_do_not_fit_are_an_error(tokens, message):
    with pytest.raises(ValueError, match=message):
        small()(tokens)


@pytest.mark.parametrize("name", ["source_vocab", "target_vocab", "width", "heads", "depth"])
def test_a_size_below_one_is_an_error(name):
    sizes = dict.fromkeys(("source_vocab", "target_vocab", "width", "heads", "depth"), 4)
    of = {"source_vocab": "vocab", "target_vocab": "vocab"}.get(name, name)
    with pytest.raises(ValueError, match=f"^{of} is a whole number from 1 to .*, not 0"):
        nn.Seq2Seq(**sizes | {name: 0}, source_length=3, target_length=3)


@pytest.mark.parametrize("S, T", [(0, 3), (3, 0)])
def test_a_sentence_without_positions_is_an_error(S, T):
    with pytest.raises(ValueError, match="context"):
        nn.Seq2Seq(4, 4, 4, 2, 1, S, T)


def test_a_width_that_does_not_split_into_heads_is_an_error():
    with pytest.raises(ValueError, match="width 5 does not split into 2 heads"):
        nn.Seq2Seq(4, 4, 5, 2, 1, 3, 3)
