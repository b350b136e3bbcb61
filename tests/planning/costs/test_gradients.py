"""Where backward comes in a model, compared with the graph that one device makes."""

import copy

import pytest

from minidist import nn
from minidist.planning.costs.gradients import needed
from tests.verify.every_option import of_sentences, of_tokens, seq2seq, transformer

MODELS = {  # a model, and what makes its batch
    "Transformer": (transformer(2), of_tokens),
    "tied, with experts": (transformer(1, tied=True, experts=2), of_tokens),
    "Seq2Seq": (seq2seq(4), of_sentences),
}


def met_in_forward(model, tokens):
    """Return {weight of a linear layer: whether its X needs a gradient}."""
    seen = {}

    def watched(name, forward):
        def run(x, *more):
            seen[name] = x.requires_grad
            return forward(x, *more)

        return run

    for linear in model.modules(nn.Linear):
        linear.forward = watched(linear.weight.name, linear.forward)
    model(tokens)
    return seen


@pytest.mark.parametrize("kind", MODELS)
def test_an_input_needs_a_gradient_where_the_graph_of_one_device_says_so(kind):
    """Every parameter in turn is the only one that is trained."""
    whole, batch = MODELS[kind]
    tokens, _ = batch(whole)
    for alone in whole.named_parameters():
        model = copy.deepcopy(whole)
        model.freeze(*(name for name in whole.named_parameters() if name != alone))
        seen = met_in_forward(model, tokens)
        said = {name: x for layer in needed(model) for name, x in layer.items()}
        assert {name: said[name] for name in seen} == seen, f"only {alone} is trained"
    assert seen, "no linear layer was watched"


def test_the_input_of_a_later_stage_needs_a_gradient_whatever_is_frozen():
    model = transformer(2).freeze()
    assert not any(x for layer in needed(model) for x in layer.values())
    first, second, *others = needed(model, starts=[2])
    assert not any([*first.values(), *second.values()])
    assert all(x for layer in others for x in layer.values())
