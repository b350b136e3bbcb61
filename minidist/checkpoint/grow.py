"""Go on with a larger model: other text with more characters, more blocks.

a new character      its rows are drawn by the parameter's name and the character; old
                     characters' rows keep every bit
a new block          the arrays that write to the residual stream are 0, so that it adds
                     nothing: the loss is the same before and after (function-preserving:
                     Chen, Goodfellow, Shlens 2016, Net2Net, whose deeper net begins with
                     layers that are the identity)
the optimizer        has zeros for what is new
"""

from collections.abc import Mapping

import numpy as np

from minidist.checkpoint.reading import Saved
from minidist.errors import WrongInput, plural
from minidist.nn import Slice
from minidist.rng import generator

DESCRIPTION = "told"  # the key of a run's description in every manifest that is saved
VOCABULARY = {"embedding.token.weight": 0, "head.linear.weight": 1}  # and its axis
WRITES = tuple(f"{part}.{kind}" for part in (".output", ".contract") for kind in ("weight", "bias"))


def changes(before: Mapping, now: Mapping) -> list[str]:
    """Describe how a run grows, given its descriptions before and now; [] if it stays as it is.

    ValueError if it would have to shrink, or to change what does not grow.
    """
    found = []
    blocks = now["settings"]["depth"] - before["settings"]["depth"]
    if blocks < 0:
        raise WrongInput("a model of fewer blocks is another model; use another folder")
    if blocks:
        found.append(plural(blocks, "new block"))
    old, data = before["data"], now["data"]
    if old == data:
        return found
    if "characters" not in old or "characters" not in data:
        raise WrongInput(
            f"the checkpoint is of a run on {old['source']}, not on {data['source']}; give it the "
            "same, or another folder"
        )
    if lost := sorted(set(old["characters"]) - set(data["characters"])):
        raise WrongInput(
            f"the character {lost[0]!r} of {old['source']} is none of the new ones; use "
            "Text.including(characters)"
        )
    new = len(data["characters"]) - len(old["characters"])
    return [*found, f"{data['source']}, {plural(new, 'new character')}"]


class Grown:
    """A checkpoint as a larger model sees it: it has all arrays, in the larger shapes.

    now     the description of the larger run
    fresh   the larger model's weights as they are drawn, by name
    shapes  of the arrays of the checkpoint, by name
    """

    def __init__(self, saved: Saved, now: Mapping, fresh: Mapping[str, np.ndarray]):
        before = saved.about[DESCRIPTION]
        self.saved, self.fresh, self.seed = saved, fresh, now["settings"]["seed"]
        self.path, self.about, self.shapes = saved.path, saved.about, saved.shapes
        old, new = (run["data"].get("characters", "") for run in (before, now))
        self.before, self.characters = old, new
        self.old = np.array([new.index(c) for c in old], np.int64)  # where the old rows go

    def part(self, cut: Slice) -> np.ndarray:
        """Return the elements of a slice: a vector."""
        return cut.of(self.whole(cut.name))

    def whole(self, name: str) -> np.ndarray:
        """Return a global array in the larger model's shape."""
        state, _, parameter = name.rpartition("/")
        drawn = self.fresh[parameter]
        if name not in self.saved.shapes:  # of a new block
            return np.zeros_like(drawn) if state or parameter.endswith(WRITES) else drawn
        old = self.saved.whole(name)
        if parameter not in VOCABULARY or self.before == self.characters:
            return old
        new = np.zeros(drawn.shape, old.dtype)
        axis = VOCABULARY[parameter]
        rows = np.moveaxis(new, axis, 0)  # a view
        rows[self.old] = np.moveaxis(old, axis, 0)
        if not state:
            for i in set(range(len(rows))) - set(self.old.tolist()):
                random = generator(self.seed, f"{parameter} {self.characters[i]}")
                rows[i] = random.standard_normal(rows[i].shape) * drawn.std()
        return new
