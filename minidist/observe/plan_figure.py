"""Plans side by side: what a step's seconds are spent on, and what the fullest rank holds."""

from minidist.observe import style
from minidist.planning.plans.estimate import Estimate
from minidist.planning.plans.why import WORDS, bytes_of, in_short

SPENT = {
    "products": style.FORWARD,
    "element-wise": style.OWN,
    "tensor": style.COMMUNICATION,
    "experts": "#F0E442",
    "context": style.EMPHASIS,
    "data": style.BACKWARD,
    "optimizer": style.UPDATE,
    "waiting": style.IDLE,
}
HELD = {
    "parameters": style.FORWARD,
    "gradients": style.BACKWARD,
    "optimizer": style.UPDATE,
    "activations": style.OWN,
    "buffers": style.COMMUNICATION,
}


def figure(plans: list[Estimate], title: str):
    """Return a figure: a row per plan, a bar of its seconds and a bar of its bytes."""
    plt = style.pyplot()
    fig, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(11, 1.8 + 0.34 * len(plans)))
    _bars(left, [e.spent for e in plans], SPENT, 1, WORDS)
    _bars(right, [e.memory for e in plans], HELD, 1e9, {})
    left.set_yticks(range(len(plans)), [in_short(e.plan) for e in plans], fontsize=8)
    left.invert_yaxis()
    left.set(xlabel="seconds of a step, mean over all ranks")
    right.set(xlabel="GB on the fullest rank")
    right.axvline(plans[0].room / 1e9, color=style.EMPHASIS, lw=1, ls="--")
    right.annotate(f" {bytes_of(plans[0].room)}", (plans[0].room / 1e9, -0.5), fontsize=8)
    for row, e in enumerate(plans):
        left.annotate(f" MFU {e.mfu:.0%}", (e.seconds, row), va="center", fontsize=8)
    fig.suptitle(title)
    return fig


def _bars(axes, rows: list[dict], colours: dict[str, str], unit: float, words: dict) -> None:
    """Draw a stacked bar per row, and a legend of the parts that there are."""
    starts = [0.0] * len(rows)
    for part, colour in colours.items():
        lengths = [row.get(part, 0) / unit for row in rows]
        if any(lengths):
            label = words.get(part, part)
            axes.barh(range(len(rows)), lengths, 0.7, starts, color=colour, label=label)
            starts = [a + b for a, b in zip(starts, lengths, strict=True)]
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8)
    axes.margins(x=0.14)
