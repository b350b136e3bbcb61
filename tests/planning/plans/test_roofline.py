"""The seconds of products and of what travels beside them, by hand."""

from minidist.planning import Machine, Plan, TransformerSize
from minidist.planning.plans.block import (
    Product,
    Times,
    block_products,
    block_times,
    hidden,
    rate_of,
)


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
        found = block_times(size, Plan(recompute=recompute), machine(), 1)["products"]
        assert found.forward == weights + scores and found.weights == weights
        assert found.inputs == weights + 2 * scores + again


def test_what_is_no_product_moves_its_numbers():
    """T = 4, C = 8 of 2 bytes at 2 bytes a second: norms and residual sums, gelu, 2 heads' scores.

    Forward reads and writes a norm and a gelu, backward reads two arrays and writes one; the sum of
    a residual is three arrays both times.
    """
    size, slow = TransformerSize(1, 8, 2, 4, 5), machine(memory_bandwidth=2.0)
    X, scores = 4 * 8, 2 * 4 * 4

    def times(rows, hidden, scores, again=0):
        forward = (2 * 2 + 2 * 3) * rows + 2 * hidden + 2 * scores
        backward = (2 * 3 + 2 * 3) * rows + 3 * hidden + 3 * scores
        return Times(forward, backward + again * forward)

    def found(given=size, **plan):
        return block_times(given, Plan(**plan), slow, 1)["element-wise"]

    assert found() == times(X, 4 * X, scores)
    assert found(recompute="full") == times(X, 4 * X, scores, again=1)
    assert found(tp=2) == times(X, 2 * X, scores / 2)
    assert found(tp=2, sequence=True) == times(X / 2, 2 * X, scores / 2)
    assert found(cp=2) == times(X / 2, 2 * X, scores / 2)
    long = TransformerSize(1, 8, 2, 256, 5)
    assert found(long) == times(64 * X, 4 * 64 * X, 0), "long rows of scores stay in tiles"


def test_a_product_has_the_share_of_its_smallest_dimension():
    by_shape = machine(flops=2.0, efficiency=((4, 0.25), (8, 0.5)))
    for rows, share in ((1, 0.25), (4, 0.25), (6, 0.375), (8, 0.5), (100, 0.5)):
        one = Product(rows, 100, 100)
        assert one.seconds(by_shape, 2) == one.flops / (2 * share)
    assert Product(5, 6, 7).seconds(machine(efficiency=0.5), 2) == 2 * 420


def test_ring_attention_has_the_queries_of_its_positions_and_all_keys():
    _, (scores, mixture) = block_products(TransformerSize(1, 8, 2, 4, 5), Plan(cp=2), 1)
    assert scores == mixture == Product(2, 4, 4, 2)


def test_the_first_or_the_last_piece_has_nothing_to_hide_behind():
    assert (hidden(8, 4, 4), hidden(4, 8, 4), hidden(8, 0, 4)) == (9, 9, 8)


def test_an_axis_is_inside_a_node_if_the_inner_axes_leave_room():
    assert rate_of("dp", Plan(dp=2), machine()) == 2
    assert rate_of("dp", Plan(dp=2, tp=2), machine()) == 1
