"""Which axes, models and options of a Hybrid go together."""

from numbers import Integral

from minidist import nn
from minidist.comm import Mesh
from minidist.data_parallel.zero import tied_between_layers
from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import Action, BackwardInput


def check_axes(mesh: Mesh, model: nn.Module, split_sequence: bool, ep: int) -> None:
    """Raise ValueError if the mesh has other axes than Hybrid, or axes that do not go together."""
    if missing := {"dp", "pp", "tp"} - set(mesh.axes):
        raise WrongInput(f"the mesh has no axis {sorted(missing)[0]}; give it size 1")
    if unknown := set(mesh.axes) - {"dp", "pp", "cp", "tp"}:
        raise WrongInput(
            f"Hybrid has no axis {sorted(unknown)[0]}; make the mesh of dp, pp, cp and tp, "
            "and give ep as an argument"
        )
    if model.loss is not nn.cross_entropy:
        raise WrongInput(
            "Hybrid cuts the vocabulary, and its loss is the cross entropy over it; this model has "
            "another loss: train it by DataParallel, Zero or Pipeline"
        )
    if isinstance(model, nn.Seq2Seq):
        check_whole(mesh, model, split_sequence)
    if split_sequence and mesh.axes.get("cp", 1) > 1:
        raise WrongInput(
            f"cp={mesh.axes['cp']} cuts the sequence already; leave out split_sequence, or use cp=1"
        )
    if not isinstance(ep, Integral) or ep < 1 or mesh.dp.size % ep:
        raise WrongInput(f"ep={ep!r} does not divide dp={mesh.dp.size}; use a divisor of it")
    if ep > 1 and not getattr(model, "experts", 0):
        raise WrongInput(f"ep={ep} needs experts; use nn.Transformer(..., experts={ep})")


def check_whole(mesh: Mesh, model: nn.Seq2Seq, split_sequence: bool) -> None:
    """Raise ValueError if the two sequences of a Seq2Seq would be cut."""
    lengths = f"{model.source_length} and {model.target_length} positions"
    if (cp := mesh.axes.get("cp", 1)) > 1:
        raise WrongInput(
            f"cp={cp} cuts one sequence, and an nn.Seq2Seq has two, of {lengths}; use cp=1, and "
            "put these ranks on dp, pp or tp"
        )
    if split_sequence:
        raise WrongInput(
            f"split_sequence cuts one sequence, and an nn.Seq2Seq has two, of {lengths}; leave it "
            "out"
        )


def check_zero(
    zero: int, shards: int | None, model: nn.Module, ep: int, split_sequence: bool, recompute: bool
) -> None:
    """Raise ValueError for a stage of ZeRO that does not go with the rest of a Hybrid."""
    if zero not in (0, 1, 2, 3):
        raise WrongInput(f"ZeRO has the stages 1, 2 and 3, and 0 is none, not {zero!r}")
    if shards is not None and (zero == 0 or ep > 1):
        raise WrongInput(
            f"shards={shards} cuts what ZeRO shares among fewer ranks, and experts over ep={ep} "
            "have fewer already; use zero=1, 2 or 3, and ep=1"
        )
    if zero > 1 and split_sequence:
        raise WrongInput(
            f"with zero={zero} every micro-batch would also sum partial gradients over tp; use "
            "zero=1, or leave out split_sequence"
        )
    if zero > 1 and recompute:
        raise WrongInput(
            "recompute hands over the gradients of all layers of a stage at once, and "
            f"zero={zero} keeps one layer's; use zero=1, or leave out recompute"
        )
    if zero > 1 and (tied := tied_between_layers(model)):
        raise WrongInput(
            f"{tied[0].name!r} belongs to several layers, and zero={zero} on a mesh keeps the "
            "gradient of one layer at a time; use a model that is not tied, or zero=1"
        )


def check_whole_backward(programs: list[list[Action]], zero: int) -> None:
    """Raise ValueError if weights' gradients come apart from the backward that they belong to."""
    halves = any(isinstance(action, BackwardInput) for program in programs for action in program)
    if zero > 1 and halves:
        raise WrongInput(
            f"zero={zero} sums a layer's gradient when backward leaves the layer, and this "
            "schedule computes it later; use zero=1, or 1f1b, gpipe, interleaved or looped_bfs"
        )
