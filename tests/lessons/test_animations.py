"""The pictures that move are those that the script makes, and end where the algorithm ends."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from lessons.support import animations
from tests.lessons.pages import ROOT


@pytest.mark.parametrize("name", animations.MOVIES)
def test_the_picture_in_the_repository_is_the_scripts(name):
    made = animations.MOVIES[name]().svg()
    assert (ROOT / "figures" / "moving" / f"{name}.svg").read_text("utf-8") == made
    ElementTree.fromstring(made)
    assert "prefers-reduced-motion" in made and "<script" not in made


@pytest.mark.parametrize("N", [2, 3, 4])
def test_after_the_last_hop_of_the_ring_every_piece_is_the_sum_of_all(N):
    movie = animations.ring(N)
    last = [part for part in movie.parts if f'class="s{2 * N}_{2 * N + 1}"' in part]
    numbers = [int(n) for part in last for n in re.findall(r">(\d+)</text>", part)]
    assert numbers == [N] * N * N


def test_the_cuts_have_the_work_that_the_lesson_counts():
    words = " ".join(animations.zigzag(4).parts)
    assert "hop 1: blocks per rank 0, 4, 4, 4" in words  # runs: rank 0 waits
    assert words.count("blocks per rank 2, 2, 2, 2") == 1 + 4  # zig-zag: nobody does
