# %% [markdown]
# # Check your own: PyTorch's gradients against one device's
#
# Your module trains on several ranks, and its loss falls. Are its gradients right? A falling loss
# does not say: a wrong gradient that points roughly the same way makes it fall, too. This page
# takes the gradients of a PyTorch module from four processes of gloo, and compares them with those
# that minidist computes on one device from the same weights. Then it plants four mistakes, and
# reads what the comparison says.
#
# It needs PyTorch: `pip install torch`. Letters: $B$ examples, $T$ positions, $C$ width, $H$ heads
# of width $D$, $L$ blocks, $V$ words, $N$ ranks.

# %% tags=["setup", "hide-input"]
import copy
import tempfile
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from support import begin
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from minidist import Cluster, verify
from minidist import nn as ours
from minidist.verify.interop import torch as interop

begin()
B, T, C, H, L, V, N = 7, 16, 32, 4, 2, 64, 4
torch.manual_seed(0)
tokens, nexts = torch.randint(0, V, (2, B, T))

# %% [markdown]
# ## Your module
#
# Let this be yours: a GPT with names of its own, in float64. In float32 small mistakes hide in
# rounding.


# %%
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.proj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        self.approximate = "tanh"

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(B, T, 3, H, -1).permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, C))
        return x + self.proj(gelu(self.fc(self.ln_2(x)), approximate=self.approximate))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.h = nn.Sequential(*[Block() for _ in range(L)])
        self.ln_f, self.lm_head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return self.lm_head(self.ln_f(self.h(x)))


module = GPT().double()

# %% [markdown]
# ## Which array is which
#
# `names` says what each part of our model is called in yours; the last words, such as `weight`, and
# the layouts follow. `interop.load` then copies your weights, and turns what has to be turned.

# %%
names = {"embedding.token": "wte", "embedding.position": "wpe"}
names |= {"head.norm": "ln_f", "head.linear": "lm_head"}
inner = {"norm_1": "ln_1", "attention.qkv": "qkv", "attention.output": "out"}
inner |= {"norm_2": "ln_2", "expand": "fc", "contract": "proj"}
names |= {f"blocks.{i}.{a}": f"h.{i}.{b}" for i in range(L) for a, b in inner.items()}
model = ours.Transformer(V, C, H, L, T, dtype="float64")
interop.load(model, module, names)
for own, theirs, transposed in interop.matches(model, names):
    if "blocks.1" not in own:
        shapes = [list(x.shape) for x in (model.state()[own], module.state_dict()[theirs])]
        turned = "transposed" if transposed else ""
        print(f"{own:<34}{shapes[0]!s:<11}{theirs:<16}{shapes[1]!s:<11}{turned}")
off = np.abs(model(tokens.numpy()).data - module(tokens).detach().numpy()).max()
print(f"largest difference of the logits: {off:.0e}")
assert off < 1e-12

# %% [markdown]
# The logits agree, so both have alike what the map does not show. The columns of `qkv` are
# `[3, H, D]`: all queries, then all keys, then all values (Megatron-LM has `[H, 3, D]`). Gelu is
# its tanh form (PyTorch's default is the erf form). The norms come before the sub-layers, with an
# eps of 1e-5. And there is no dropout, since no two libraries draw the same masks.
#
# ## Four ranks of gloo
#
# A rank gets its share of the batch, and leaves its gradients in `p.grad`. The seven examples are
# cut into 2, 2, 2 and 1. DistributedDataParallel (DDP) leaves the *mean* of the ranks' gradients,
#
#     g = (1/N) sum_k d loss_k / dw,      loss_k = (N/n) sum of the losses of rank k's targets
#
# so that the factor on the right gives the mean over the `n` targets of *all* ranks. The processes
# are those of a `Cluster`, which ends them, whatever happens; they find each other by a file, and
# wait for at most five minutes. `interop.of_ranks` collects all ranks' gradients and weights, here
# and under `torchrun`.


# %%
def share(rank):
    return tokens.tensor_split(N)[rank], nexts.tensor_split(N)[rank].flatten()


def right(rank, module):
    x, y = share(rank)
    ddp = DistributedDataParallel(module)  # without a name it ends here, and its hooks with it
    loss = cross_entropy(ddp(x).flatten(0, 1), y, reduction="sum") * N / nexts.numel()
    loss.backward()


def on_gloo(group, leave_gradients, module, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, timedelta(minutes=5), group.size, group.rank)
    try:
        leave_gradients(group.rank, module)
        return interop.of_ranks(module)
    finally:
        dist.destroy_process_group()


def compared(leave_gradients, module):
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        collected = cluster.run(on_gloo, leave_gradients, module, store, timeout=300)[0]
    verdict = verify.against(model, inputs=tokens, targets=nexts, names=names, **collected)
    return collected["gradients"], verdict


cluster = Cluster(N)
good, verdict = compared(right, module)
print(verdict)
assert verdict  # all that a test of yours needs

# %% [markdown]
# ## Four mistakes
#
# **A mean of means.** `cross_entropy` by default takes the mean over the targets of its own rank,
# and DDP the mean over ranks. The fourth rank's one example counts as much as two elsewhere. The
# same happens with micro-batches, and wherever padding leaves ranks unequal numbers of targets.
#
# **A parameter without its all_reduce.** Here the ranks sum without DDP, and forget the first
# parameter, as happens to one that is registered late, or whose gradient was None.
#
# **Weights that were not broadcast.** Each rank begins with another bias, so the sum mixes
# gradients of different models.
#
# **Another gelu.** All collectives are right, and the model is not quite the one you meant.
#
# Before you go on: which of them would a curve of the loss show?


# %%
def mean_of_means(rank, module):
    x, y = share(rank)
    ddp = DistributedDataParallel(module)
    cross_entropy(ddp(x).flatten(0, 1), y).backward()


def forgetful(rank, module, first=1):
    x, y = share(rank)
    (cross_entropy(module(x).flatten(0, 1), y, reduction="sum") / nexts.numel()).backward()
    for p in list(module.parameters())[first:]:
        dist.all_reduce(p.grad)


def not_broadcast(rank, module):
    module.ln_f.bias.data += 0.01 * rank
    forgetful(rank, module, first=0)


erf = copy.deepcopy(module)
for block in erf.h:
    block.approximate = "none"


def cosine(gradients):  # of the angle between rank 0's gradient and the right one
    a, b = (torch.cat([g.flatten() for g in ranks[0].values()]) for ranks in (gradients, good))
    return float(a @ b / (a.norm() * b.norm()))


for leave_gradients, trained, words in [
    (mean_of_means, module, "the mean of the ranks' means"),
    (forgetful, module, "the all_reduce is missing, only in embedding.token.weight"),
    (not_broadcast, module, "ranks 1, 2, 3 have other weights than rank 0, in head.norm.bias"),
    (right, erf, "the gelu is the erf form"),
]:
    gradients, verdict = compared(leave_gradients, trained)
    print(f"\ncosine to the right gradient {cosine(gradients):.6f}\n{verdict}")
    assert not verdict and words in str(verdict) and cosine(gradients) > 0.9
cluster.close()

# %% [markdown]
# None: all four point the right way, so the loss falls. The comparison needs no curve: it tells
# which parameters are wrong, on which rank, by what ratio; and, where the numbers show it, why.
#
# ## Your turn
#
# Put your module in the place of `GPT`, and your names into `names`. An `MLP`, a `Transformer`, a
# `Seq2Seq` and a `CNN` have a model here; `interop.twins.twin(model)` is each in plain PyTorch, to
# begin with. An `nn.Llama` needs lists in `names`: `key_value` is your `["k_proj", "v_proj"]`,
# `expand` your `["gate_proj", "up_proj"]`. What FSDP2 has cut, `of_ranks` gathers. What is written
# with minidist's own collectives is checked by `verify.certify`
# ([how](../minidist/README.md#as-an-oracle)). DDP's own paper is
# [Li et al. 2020](https://arxiv.org/abs/2006.15704).
