"""Which axes, models and options of a Hybrid go together."""

from numbers import Integral

from minidist import nn
from minidist.comm import Mesh


def check_axes(mesh: Mesh, model: nn.Module, split_sequence: bool, ep: int) -> None:
    """Raise ValueError if the mesh has other axes than Hybrid, or axes that do not go together."""
    if missing := {"dp", "pp", "tp"} - set(mesh.axes):
        raise ValueError(f"the mesh has no axis {sorted(missing)[0]}; give it size 1")
    if unknown := set(mesh.axes) - {"dp", "pp", "cp", "tp"}:
        raise ValueError(
            f"Hybrid has no axis {sorted(unknown)[0]}; make the mesh of dp, pp, cp and tp, "
            "and give ep as an argument"
        )
    if isinstance(model, nn.Seq2Seq):
        check_whole(mesh, model, split_sequence)
    if split_sequence and mesh.axes.get("cp", 1) > 1:
        raise ValueError(
            f"cp={mesh.axes['cp']} cuts the sequence already; leave out split_sequence, or use cp=1"
        )
    if not isinstance(ep, Integral) or ep < 1 or mesh.dp.size % ep:
        raise ValueError(f"ep={ep!r} does not divide dp={mesh.dp.size}; use a divisor of it")
    if ep > 1 and not getattr(model, "experts", 0):
        raise ValueError(f"ep={ep} needs experts; use nn.Transformer(..., experts={ep})")


def check_whole(mesh: Mesh, model: nn.Seq2Seq, split_sequence: bool) -> None:
    """Raise ValueError if the two sequences of a Seq2Seq would be cut."""
    lengths = f"{model.source_length} and {model.target_length} positions"
    if (cp := mesh.axes.get("cp", 1)) > 1:
        raise ValueError(
            f"cp={cp} cuts one sequence, and an nn.Seq2Seq has two, of {lengths}; use cp=1, and "
            "put these ranks on dp, pp or tp"
        )
    if split_sequence:
        raise ValueError(
            f"split_sequence cuts one sequence, and an nn.Seq2Seq has two, of {lengths}; leave it "
            "out"
        )
