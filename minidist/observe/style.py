"""The colours of every figure; and the figures of `minidist train` and `plan`.

The colours are from Okabe and Ito; colour-blind readers can tell them apart. All else of the style
is in style.mplstyle.
"""

import builtins
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minidist.errors import WrongInput

if TYPE_CHECKING:
    from minidist.planning.plans.estimate import Estimate

FORWARD, BACKWARD, UPDATE, COMMUNICATION = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
EMPHASIS, INK, IDLE = "#D55E00", "#222222", "#BBBBBB"
OWN, SAME = "#56B4E9", "#E4E4E4"  # what a rank has of its own; what all ranks have alike
ROW = "#F0F0F0"  # of a rank's row in a timeline: what stays grey is idle

SPENT = {
    "products": FORWARD,
    "element-wise": OWN,
    "tensor": COMMUNICATION,
    "experts": "#F0E442",
    "context": EMPHASIS,
    "data": BACKWARD,
    "optimizer": UPDATE,
    "waiting": IDLE,
}
HELD = {
    "parameters": FORWARD,
    "gradients": BACKWARD,
    "optimizer": UPDATE,
    "activations": OWN,
    "buffers": COMMUNICATION,
}


def pyplot():
    """Return matplotlib.pyplot in this style.

    A script needs no window, so it gets the Agg backend; a notebook, or a program that has already
    chosen a backend, keeps it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise WrongInput("the figures need matplotlib: pip install 'minidist[lessons]'") from error
    if not in_notebook() and "matplotlib.pyplot" not in sys.modules:
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.style.use(Path(__file__).with_suffix(".mplstyle"))
    return plt


def in_notebook() -> bool:
    return hasattr(builtins, "get_ipython")


def save_loss_curve(
    path: str, losses: Sequence[float], rates: Sequence[float], unit: str, title: str
) -> None:
    """Write each step's loss, in nats per `unit`; below it the rates of the last steps, if any."""
    plt, heights = pyplot(), [3, 1] if rates else [1]
    figure, axes = plt.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    steps = range(1, len(losses) + 1)
    axes[0, 0].plot(steps, losses, color=FORWARD, linewidth=1)
    axes[0, 0].set(title=title, ylabel=f"loss (nats per {unit})")
    if rates:
        axes[1, 0].plot(steps[-len(rates) :], rates, color=EMPHASIS)
        axes[1, 0].set(ylabel="learning rate", ylim=(0, None))
    axes[-1, 0].set(xlabel="step")
    figure.savefig(path)
    plt.close(figure)


def plan_figure(plans: "list[Estimate]", title: str):
    """Return a figure: per plan a bar of its seconds and a bar of the fullest rank's bytes."""
    from minidist.planning.plans.why import WORDS, bytes_of, in_short

    plt = pyplot()
    fig, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(11, 1.8 + 0.34 * len(plans)))
    _bars(left, [e.spent for e in plans], SPENT, 1, WORDS)
    _bars(right, [e.memory for e in plans], HELD, 1e9, {})
    left.set_yticks(range(len(plans)), [in_short(e.plan) for e in plans], fontsize=8)
    left.invert_yaxis()
    left.set(xlabel="seconds of a step, mean over all ranks")
    right.set(xlabel="GB on the fullest rank")
    right.axvline(plans[0].room / 1e9, color=EMPHASIS, lw=1, ls="--")
    right.annotate(f" {bytes_of(plans[0].room)}", (plans[0].room / 1e9, -0.5), fontsize=8)
    for row, e in enumerate(plans):
        left.annotate(f" MFU {e.mfu:.0%}", (e.seconds, row), va="center", fontsize=8)
    fig.suptitle(title)
    return fig


def _bars(axes, rows: list[dict], colours: dict[str, str], unit: float, labels: dict) -> None:
    """Draw a stacked bar per row, and a legend of the parts that there are."""
    starts = [0.0] * len(rows)
    for part, colour in colours.items():
        lengths = [row.get(part, 0) / unit for row in rows]
        if any(lengths):
            label = labels.get(part, part)
            axes.barh(range(len(rows)), lengths, 0.7, starts, color=colour, label=label)
            starts = [a + b for a, b in zip(starts, lengths, strict=True)]
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8)
    axes.margins(x=0.14)
