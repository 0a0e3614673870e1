"""Random sampled trees, and the comparison of an outcome with the reference's."""

from typing import NamedTuple

import torch

from frspec_kernels import tree
from frspec_kernels.sampling import DraftLists, Sampling, accept_sampled
from frspec_kernels.sampling_tree_reference import LOSSLESS, accept_sampled_reference
from tests.kernels.tree_oracle import poison

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Float32 may decide differently from float64 within this share of a chance; as rare as it is small.
CLEAR = 2e-5


class Problem(NamedTuple):
    logits: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    seq_lens: torch.Tensor
    max_path: int
    sampling: Sampling
    lists: DraftLists | None

    def on(self, device):
        def move(x):
            return x.to(device)

        logits, tokens, parents, lens = map(move, self[:4])
        lists = self.lists
        if lists is not None:
            drawn, rows, ids, q = map(move, lists[:4])
            lists = DraftLists(drawn, rows, ids, q, lists.fixed)
        sampling = changed(self.sampling, move)
        return Problem(logits, tokens, parents, lens, self.max_path, sampling, lists)

    @property
    def arguments(self):
        """Of ``accept_sampled``, without the lists."""
        return (self.logits, self.tokens, self.parents, self.seq_lens, self.max_path, self.sampling)


def changed(sampling, change) -> Sampling:
    """Each parameter tensor put through ``change``."""
    t, k, p, m, seeds = map(change, sampling[:5])
    return Sampling(t, k, p, m, seeds, sampling.truncates)


def sampling_of(batch, generator, kinds=None, truncates=True):
    """Parameters that differ from request to request; ``kinds`` are (T, top-k, top-p, min-p)."""
    kinds = kinds or [
        (1.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.3, 5, 1.0, 0.0), (0.9, 0, 1.0, 0.2),
        (1.0, 8, 0.8, 0.05), (1.0, 1, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 1 << 30, 0.35, 0.0),
    ]  # fmt: skip
    rows = [kinds[i % len(kinds)] for i in range(batch)]
    t, k, p, m = (torch.tensor(x) for x in zip(*rows, strict=True))
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    return Sampling(t.float(), k.int(), p.float(), m.float(), seeds, truncates)


def random_tree(batch, nodes, vocab, depth, generator):
    """Tokens [B, N] and parents [B, N]: siblings distinct, no path longer than ``depth`` + 1."""
    tokens = torch.randint(0, vocab, (batch, nodes), generator=generator)
    parents = torch.full((batch, nodes), -1, dtype=torch.int32)
    for b in range(batch):
        depths, taken = [0], [set()]
        for n in range(1, nodes):
            open_nodes = [i for i in range(n) if depths[i] < depth and len(taken[i]) < vocab]
            parent = open_nodes[int(torch.randint(0, len(open_nodes), (1,), generator=generator))]
            token = int(tokens[b, n])
            while token in taken[parent]:
                token = (token + 1) % vocab
            taken[parent].add(token)
            taken.append(set())
            depths.append(depths[parent] + 1)
            tokens[b, n], parents[b, n] = token, parent
    return tokens, parents


def problem(batch, nodes, vocab, depth, seed, *, dtype=torch.float32, peak=2.0, **options):
    """Fixed children only; the target often agrees with one of them."""
    g = torch.Generator().manual_seed(seed)
    tokens, parents = random_tree(batch, nodes, vocab, depth, g)
    logits = (peak * torch.randn(batch * nodes, vocab, generator=g)).to(dtype)
    for n in range(1, nodes):
        rows = torch.arange(batch) * nodes + parents[:, n]
        logits[rows, tokens[:, n]] += (4 + 2 * torch.rand(batch, generator=g)).to(dtype)
    lens = torch.randint(1, 5000, (batch,), generator=g)
    sampling = sampling_of(batch, g, **options)
    return Problem(logits, tokens, parents, lens, depth + 1, sampling, None)


def with_lists(base, width, fixed, seed):
    """The same tree, with each node's last child made a draw from a list of the draft."""
    g = torch.Generator().manual_seed(seed)
    batch, nodes = base.tokens.shape
    vocab = base.logits.shape[1]
    logits = base.logits.float().view(batch, nodes, vocab)
    draft = (logits + torch.randn(logits.shape, generator=g)).softmax(-1)
    q, ids = draft.topk(width, dim=-1)
    tokens = base.tokens.clone()
    drawn = torch.zeros(batch, nodes, dtype=torch.int8)
    rows = torch.full((batch, nodes), -1, dtype=torch.int32)
    for b in range(batch):
        for n in range(nodes):
            children = [c for c in range(1, nodes) if base.parents[b, c] == n]
            best = ids[b, n, :fixed].tolist()
            rest = torch.multinomial(q[b, n, fixed:], width - fixed, generator=g) + fixed
            for place, c in enumerate(children):
                if place < len(children) - 2 and place < fixed:
                    tokens[b, c] = best[place]
                else:
                    left = ids[b, n, rest].tolist()
                    tokens[b, c] = left[place % len(left)]
                    drawn[b, c], rows[b, n] = 1, n
    return base._replace(tokens=tokens, lists=DraftLists(drawn, rows, ids, q.contiguous(), fixed))


def run(p, **options):
    """The kernels' outcome into poisoned memory."""
    batch, nodes = p.tokens.shape
    out = poison(
        tree.empty_accepted(batch, nodes, p.max_path, p.tokens.device, slots="slots" in options)
    )
    return accept_sampled(*p.arguments, lists=p.lists, out=out, **options)


def assert_outcomes(p, got, thresholds=LOSSLESS, unclear=0.02):
    """Every request whose outcome is clear is the reference's; few are unclear."""
    got = type(got)(*(None if t is None else t.cpu() for t in got))
    q = p.on("cpu")
    paths = accept_sampled_reference(
        q.logits, q.tokens, q.parents, q.seq_lens, q.sampling, q.lists, thresholds
    )
    batch, nodes = q.tokens.shape
    doubtful = [b for b, path in enumerate(paths) if path.margin <= CLEAR]
    assert len(doubtful) <= unclear * batch + 1, doubtful
    for b, path in enumerate(paths):
        if b in doubtful:
            continue
        count, n = len(path.nodes), path.nodes
        padding = [-1] * (p.max_path - count)
        said = [*q.tokens[b, list(n[1:])].tolist(), path.bonus]
        where = f"request {b}, margin {path.margin}"
        assert got.accept_index[b].tolist() == [b * nodes + i for i in n] + padding, where
        assert got.path_tokens[b].tolist() == said + [0] * len(padding), where
        assert int(got.accept_lens[b]) == count, where
        assert int(got.bonus_tokens[b]) == path.bonus, where
        assert int(got.new_seq_lens[b]) == int(q.seq_lens[b]) + count, where
        predicts = dict(zip(n, said, strict=True))
        own = got.predicts[b * nodes : (b + 1) * nodes].tolist()
        assert own == [predicts.get(i, 0) for i in range(nodes)], where
    return paths
