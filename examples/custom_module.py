"""Train a model that is not from Hugging Face, on every rank that torchrun started."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fourfold as ff

HIDDEN, HEADS, VOCABULARY, LENGTH = 128, 8, 500, 32

ROLES = {
    "embed": "embedding_rowwise",
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS  # on a grid each rank reads its own number of heads here
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length = hidden.shape[:2]
        q, k, v = (
            project(hidden).view(rows, length, self.num_heads, -1).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.first(hidden))
        return hidden + self.down(F.gelu(self.up(self.second(hidden))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def train(grid: ff.Grid, steps: int = 5) -> list[float]:
    """The losses of some steps, the same on every grid."""
    with torch.device("meta"):  # no rank ever holds the full model
        model = Model()
    report = ff.parallelize(model, grid, roles=ROLES, seed=0)
    if dist.get_rank() == 0:
        print(report)
    optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-3)
    ids = torch.randint(VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    ids = ids[grid.local_rows(len(ids))].to(grid.device)
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)  # each position predicts the next token, the last one none
    losses = []
    for _ in range(steps):
        # The logits are this rank's columns of the vocabulary; the loss is the mean over the global batch.
        loss = ff.cross_entropy(model(ids), labels, grid)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = train(ff.Grid.create((1, 2, 2, 2)))  # data, z, y, x: 8 ranks
    if dist.get_rank() == 0:
        print(losses)
    dist.destroy_process_group()
