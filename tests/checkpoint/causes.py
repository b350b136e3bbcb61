"""What went wrong with a checkpoint, from what the ranks hold after they have loaded it."""

from collections.abc import Mapping

import numpy as np

from minidist.checkpoint import Part
from minidist.parallel.mixed_precision import LossScale


def of_load(
    ranks: list[tuple[list[Part], int]], whole: Mapping[str, np.ndarray], steps: int
) -> str | None:
    """Return the cause of the first difference; None: every rank holds what was saved.

    ranks  of each rank its parts (parts_of) and its optimizer's step
    whole  the global arrays that were saved;  steps: the step that was saved
    """
    for rank, (parts, found) in enumerate(ranks):
        held = {part.cut.name for part in parts}
        lost = [name for name in sorted(held) if f"optimizer.0/{name}" in set(whole) - held]
        if lost:
            return f"rank {rank} has no average of {lost[0]}: the optimizer begins with zeros"
        if found != steps:
            return f"on rank {rank} the optimizer goes on from step {found}, not {steps}"
        for part in parts:
            if not same(part, part, whole):
                return f"{part.cut.name}: rank {rank} {other_part(part, ranks, whole)}"
    return None


def of_scale(found: LossScale, want: LossScale) -> str | None:
    """Return the cause, if a run goes on with another loss scale than it had; None: it has not."""
    if found.value != want.value:
        return f"the loss scale goes on from {found.value:.0f}, not {want.value:.0f}"
    if found.state != want.state:
        return f"the loss scale counts {found.good} good steps in a row, not {want.good}"
    return None


def same(part: Part, cut: Part, whole: Mapping[str, np.ndarray]) -> bool:
    """Return whether the values of one part are those that another one should have."""
    return np.array_equal(part.on_host().reshape(-1), cut.cut.of(whole[part.cut.name]))


def other_part(part: Part, ranks: list, whole: Mapping[str, np.ndarray]) -> str:
    """Return in words whose values a part has."""
    values = part.on_host().reshape(-1)
    if np.array_equal(values, part.cut.of(whole[part.cut.name]).astype("float16")):
        return "holds rounded weights: the float32 copies were not saved"
    for rank, (parts, _) in enumerate(ranks):
        for other in parts:
            if other.cut.name == part.cut.name and same(part, other, whole):
                return f"holds the part of rank {rank}"
    return "holds numbers that were not saved"
