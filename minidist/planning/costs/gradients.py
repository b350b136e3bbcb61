"""Where backward comes in a model, given what is trained.

A collective's backward runs only if the array that the collective takes needs a gradient: if a
parameter that is trained, or an input that needs a gradient, comes before it in execution order.
Where a whole prefix of the model is frozen, as in fine-tuning, backward ends at the first parameter
that is trained. All closed forms of bytes read this here.

Later stages of a pipeline are no part of that prefix: the executor sends the gradient over every
boundary, whatever is frozen, because a program does not depend on the model. So the input of each
stage but the first needs a gradient.
"""

from collections.abc import Iterable

from minidist import nn

Needs = dict[str, bool]


def needed(model: nn.Sequential, starts: Iterable[int] = ()) -> list[Needs]:
    """Return per layer {parameter: whether the X that meets it in forward needs a gradient}.

    starts  layers whose input needs a gradient: the first ones of a pipeline's later stages
    """
    found, x = [], False
    for i, layer in enumerate(model.layers):
        met: Needs = {}
        x = _run(in_order(layer), x or i in starts, met)
        found.append(met)
    return found


def needed_at(layer: Needs, end: str) -> bool:
    """Return whether the X that meets a parameter whose name ends so needs a gradient."""
    return any(x for name, x in layer.items() if name.endswith(end))


def in_order(layer: nn.Module) -> nn.Module | list | tuple:
    """Return a layer's modules in execution order: a list one after the other, a tuple of one X."""
    match layer:
        case nn.ExpertBlock(attention=a, mixture=m):
            parts = (m.gate, *m.experts, *filter(None, [m.shared]))
            return [layer.norm_1, *products_of(a), layer.norm_2, parts]
        case nn.Block(attention=a) | nn.EncoderBlock(attention=a):
            return [layer.norm_1, *products_of(a), layer.norm_2, layer.expand, layer.contract]
        case nn.DecoderBlock(cross=a):
            target = [layer.norm_1, layer.attention, layer.norm_2, a.query]
            source = [layer.norm_source, a.key_value]
            return [(target, source), a.output, layer.norm_3, layer.expand, layer.contract]
    return layer


def products_of(attention: nn.Module) -> list:
    """Return the parts of an attention to its own input: some make queries apart."""
    if isinstance(attention, nn.PaddedAttention | nn.GroupedQueryAttention):
        return [(attention.query, attention.key_value), attention.output]
    return [attention]


def _run(part: nn.Module | list | tuple, x: bool, met: Needs) -> bool:
    """Return whether Y needs a gradient, given whether X does; add to `met` what X meets."""
    if isinstance(part, tuple):
        ends = [_run(branch, x, met) for branch in part]
        return any(ends)
    if isinstance(part, list):
        for each in part:
            x = _run(each, x, met)
        return x
    for p in part.parameters():
        met[str(p.name)] = x
        x = x or p.requires_grad
    return x
