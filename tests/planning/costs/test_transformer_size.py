"""Parameters and products of any size: equal to those of real models of small sizes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn
from minidist.pipeline_parallel.partition import counted_costs
from minidist.planning import TransformerSize

small = st.integers(1, 3)
sizes = st.tuples(small, small, small, st.integers(1, 6), st.integers(2, 9), st.booleans())


@settings(max_examples=25)
@given(sizes, st.sampled_from([0, 1, 3]))
def test_a_real_model_has_as_many_parameters_and_products(drawn, experts):
    """All experts are chosen, so that their products do not depend on the routing."""
    L, H, D, T, V, tied = drawn
    more = {"experts": experts, "top_k": experts, "capacity": None} if experts else {}
    model = nn.Transformer(V, H * D, H, L, T, tied=tied, **more)
    size, tokens = TransformerSize.of(model), np.zeros((2, T), int)
    assert size.parameters == sum(p.size for p in model.parameters())
    _, *blocks, head = counted_costs(model, tokens)
    assert blocks == [size.block_multiply_adds(2 * T)] * L
    assert size.flops(2) == 6 * (sum(blocks) + head)
    assert size.flops(2, recompute=True) == size.flops(2, "full") == 8 * sum(blocks) + 6 * head


def test_selective_recomputation_runs_attentions_two_products_again():
    size = TransformerSize(3, 16, 4, 8, 12)
    assert size.flops(5, "selective") - size.flops(5) == 3 * 2 * (2 * 5 * 8 * 8 * 16)
    assert size.flops(5, "none") == size.flops(5)
