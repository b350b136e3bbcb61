"""The seconds of products and of what travels beside them, by hand."""

from minidist.planning import Machine, Plan, TransformerSize
from minidist.planning.estimate import hidden, rate_of
from minidist.planning.roofline import Product, block_products, block_times


def machine(**more):
    return Machine(8, 2, **({"flops": 1.0, "memory": 1.0, "link": 2.0, "network": 1.0} | more))


def test_a_product_takes_the_slower_of_its_two_rates():
    one = Product(2, 3, 4)  # 48 operations; 6 + 12 + 8 numbers
    assert one.seconds(machine(flops=4.0, memory_bandwidth=52.0), 2) == 12
    assert one.seconds(machine(flops=48.0, memory_bandwidth=2.0), 2) == 26


def test_backward_is_twice_forward_and_what_runs_again():
    size = TransformerSize(1, 8, 2, 4, 5)
    weights, scores = (sum(x.flops for x in each) for each in block_products(size, Plan(), 1))
    assert (weights, scores) == (2 * 4 * 12 * 8 * 8, 2 * 2 * 4 * 4 * 8)
    for recompute, again in (("none", 0), ("selective", scores), ("full", weights + scores)):
        found = block_times(size, Plan(recompute=recompute), machine(), 1)
        assert found.forward == weights + scores and found.weights == weights
        assert found.inputs == weights + 2 * scores + again


def test_ring_attention_has_the_queries_of_its_positions_and_all_keys():
    _, (scores, mixture) = block_products(TransformerSize(1, 8, 2, 4, 5), Plan(cp=2), 1)
    assert scores == (2, 4, 4, 2) and mixture == (2, 4, 4, 2)


def test_the_first_or_the_last_piece_has_nothing_to_hide_behind():
    assert (hidden(8, 4, 4), hidden(4, 8, 4), hidden(8, 0, 4)) == (9, 9, 8)


def test_an_axis_is_inside_a_node_if_the_inner_axes_leave_room():
    assert rate_of("dp", Plan(dp=2), machine()) == 2
    assert rate_of("dp", Plan(dp=2, tp=2), machine()) == 1
