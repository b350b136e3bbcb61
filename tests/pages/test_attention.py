"""The page of attention over ranks: its cuts, blocks and bytes are the package's."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minidist.context_parallel import plain, zigzag
from minidist.context_parallel.ring_attention import RingAttention
from minidist.context_parallel.tiles import tiles
from minidist.observe.pages import answers
from minidist.observe.pages import attention as page
from minidist.pieces import Positions
from minidist.planning.costs.layers import ring_bytes, ulysses_bytes


@st.composite
def questions(draw):
    """A question with any cut; ranks without a piece, too."""
    N, pieces = draw(st.integers(2, 8)), draw(st.sampled_from([8, 16]))
    own = "".join(map(str, draw(st.lists(st.integers(0, N - 1), min_size=pieces, max_size=pieces))))
    cut = draw(st.sampled_from(["plain", "zigzag", "turns", own]))
    length = 128 * pieces * draw(st.integers(1, 3))
    return {"cut": cut, "ranks": N, "pieces": pieces, "length": length, "bytes": 8 * N}


def held_by(question, owner):
    T = question["length"]
    long, N = T // question["pieces"], question["ranks"]
    runs = [
        [(p * long, (p + 1) * long) for p, r in enumerate(owner) if r == own] for own in range(N)
    ]
    return [Positions(tuple(own), T) for own in runs]


def test_cuts_of_the_page_are_those_of_the_package():
    for name, cut in ("plain", plain), ("zigzag", zigzag):
        for N in (2, 4, 8):
            question = {**page.FIRST, "cut": name, "ranks": N}
            held = held_by(question, page.answer(**question)["owner"])
            for ours, theirs in zip(held, cut(question["length"], N), strict=True):
                assert np.array_equal(ours.indices, theirs.indices)


@given(question=questions())
def test_work_of_a_hop_is_what_the_blocks_that_ring_attention_computes_have(question):
    found, N = page.answer(**question), question["ranks"]
    held = held_by(question, found["owner"])
    for hop, work in enumerate(found["work"]):
        for r in range(N):
            blocks = tiles(held[r], held[(r - hop) % N])
            assert work[r] == sum(len_of(rows) * len_of(keys) for rows, keys, _ in blocks)


def len_of(rows):
    return rows.stop - rows.start


def test_keys_reach_a_rank_in_the_order_in_which_ring_attention_takes_them():
    hop_of = np.array(page.answer(**page.FIRST)["hop"])  # plain: piece 4 s is of rank s
    for r in range(4):
        group = SimpleNamespace(rank=r, size=4, send=lambda *a: None, recv=lambda *a: np.zeros(1))
        order = [source for source, _ in RingAttention(group, []).blocks(np.zeros(1))]
        assert [order.index(s) for s in range(4)] == hop_of[4 * r, ::4].tolist()


@given(question=questions())
def test_every_block_on_or_below_the_diagonal_is_computed_once_and_no_other_is(question):
    found = page.answer(**question)
    blocks, hop, owner = map(np.array, (found["blocks"], found["hop"], found["owner"]))
    assert ((blocks > 0) == np.tri(len(owner))).all()
    assert blocks.sum() == np.sum(found["work"])
    assert ((owner[:, None] - hop) % question["ranks"] == owner).all()


@given(question=questions())
def test_bytes_of_the_hops_are_the_closed_form_of_a_forward(question):
    found = page.answer(**question)
    sizes, n = list(map(len, held_by(question, found["owner"]))), question["bytes"]
    assert np.sum(found["sent"], 0).tolist() == [forward for forward, _ in ring_bytes(sizes, n)]
    assert (found["ring"], found["ulysses"]) == (ring_bytes(sizes, n), ulysses_bytes(sizes, n))


def test_a_cut_of_the_reader_is_compared_with_the_others():
    found = page.answer(**{**page.FIRST, "cut": "0123012301230123"})
    *_, turns, own = found["cuts"]
    assert own == {**turns, "cut": "0123012301230123"} and len(found["cuts"]) == 4


def test_what_cannot_be_is_said():
    for wrong, sentence in [
        ({"cut": "0129"}, "or the rank, 0 to 3, of each of 16 pieces"),
        ({"cut": "4" * 16}, "not '4444444444444444'"),
        ({"ranks": 9}, "2 to 8 ranks"),
        ({"pieces": 7}, "8, 16 or 32 pieces"),
        ({"bytes": 0}, "n from 1 to"),
        ({"length": 16000}, "use a multiple of 2048 positions to 65536, not 16000"),
    ]:
        found = answers.answer({"page": "attention", **page.FIRST, **wrong})
        assert list(found) == ["error"] and sentence in found["error"]
