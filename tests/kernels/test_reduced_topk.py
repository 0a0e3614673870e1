import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from bench.checks import no_worse_than_torch, ties_to_smaller_id
from bench.ops._reduced_topk_check import Reference, check_float32
from frspec_kernels.reduced_topk import (
    FinalNorm,
    LaunchConfig,
    TopK,
    allocate_output,
    allocate_workspace,
    merge_shards,
    reduced_vocab_topk,
    reduced_vocab_topk_reference,
    reduced_vocab_topk_shard,
)

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# tl.dot on bf16 is not right under the interpreter.
DTYPES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]
FP16 = torch.float16
CONFIGS = [
    LaunchConfig(16, 32, 1, 1),
    LaunchConfig(32, 64, 2, 3),
    LaunchConfig(64, 128, 4, 4),
    LaunchConfig(128, 64, 8, 2),
]


def rows_of(rows, width, dtype=FP16, stride=None, scale=1.0):
    """Random rows in a NaN-filled buffer, so that a read beyond a row's end shows."""
    buffer = torch.full((rows, stride or width), math.nan, dtype=dtype, device=DEVICE)
    buffer[:, :width] = torch.randn(rows, width, device=DEVICE) * scale
    return buffer[:, :width]


def poisoned(rows, k):
    return TopK(
        torch.full((rows, k), math.nan, device=DEVICE),
        torch.full((rows, k), -1, dtype=torch.int64, device=DEVICE),
        torch.full((rows,), math.nan, device=DEVICE),
    )


def some_ids(vocab, top=1 << 20):
    """Distinct token ids in no order."""
    return torch.randperm(top, device=DEVICE)[:vocab].contiguous()


def logits_of(hidden, weights, scale=None, temperature=None):
    logits = hidden @ weights.to(hidden.dtype).T
    if logits.dtype != torch.float64:
        logits = logits.float()
    if scale is not None:
        logits = logits * scale
    return logits if temperature is None else logits / temperature[:, None]


def exact(hidden, weights, *factors):
    return logits_of(hidden.double(), weights.double(), *factors)


def assert_right(out, hidden, weights, scale=None, temperature=None, token_ids=None):
    """Values, ids and log-sum-exp against fp64: as good as PyTorch with float32 logits."""
    if token_ids is None:
        token_ids = torch.arange(len(weights), device=DEVICE)
    factors = scale, temperature
    reference = Reference(
        exact(hidden, weights, *factors),
        logits_of(hidden, weights, *factors),
        logits_of(hidden.float(), weights.float(), *factors),
        hidden.shape[1],
        token_ids,
    )
    verdict = check_float32(out, reference) & ties_to_smaller_id(out.probs, out.token_ids)
    assert verdict.ok, verdict.why


SHAPES = [  # rows, vocab, hidden size, k
    (1, 1, 16, 1),
    (1, 130, 64, 1),
    (2, 64, 32, 10),
    (3, 257, 100, 8),
    (17, 150, 48, 3),
    (40, 70, 33, 5),
    (70, 90, 16, 2),
    (2, 200, 32, 64),
    (2, 64, 32, 64),
    (1, 10, 130, 10),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab", "width", "k"), SHAPES)
def test_random(rows, vocab, width, k, dtype):
    hidden, head = rows_of(rows, width, dtype), rows_of(vocab, width, dtype, scale=0.3)
    out = reduced_vocab_topk(hidden, head, k, out=poisoned(rows, k))
    assert_right(out, hidden, head)


@pytest.mark.parametrize("int_dtype", [torch.int64, torch.int32], ids=str)
def test_token_map(int_dtype):
    hidden, head, ids = rows_of(3, 64), rows_of(100, 64), some_ids(100).to(int_dtype)
    out = reduced_vocab_topk(hidden, head, 7, token_map=ids, out=poisoned(3, 7))
    assert_right(out, hidden, head, token_ids=ids.long())


def test_strided_rows():
    hidden, head = rows_of(3, 64, stride=96), rows_of(100, 64, stride=80)
    out = reduced_vocab_topk(hidden, head, 7, out=poisoned(3, 7))
    assert_right(out, hidden, head)


def test_temperature_of_each_row():
    hidden, head = rows_of(4, 64), rows_of(100, 64, scale=0.2)
    temperature = torch.tensor([0.25, 1.0, 3.0, 0.7], device=DEVICE)
    out = reduced_vocab_topk(hidden, head, 7, temperature=temperature, out=poisoned(4, 7))
    assert_right(out, hidden, head, temperature=temperature)


def test_log_probabilities():
    hidden, head = rows_of(2, 64), rows_of(100, 64)
    probs = reduced_vocab_topk(hidden, head, 9)
    logs = reduced_vocab_topk(hidden, head, 9, log_probs=True)
    assert (logs.token_ids == probs.token_ids).all()
    assert_right(TopK(logs[0].exp(), *logs[1:]), hidden, head)
    # A probability that float32 cannot hold has a logarithm all the same.
    head[:, 0] = 0
    head[5, 0] = 200
    hidden[:, 0] = 1
    spiked = reduced_vocab_topk(hidden, head, 2, log_probs=True)
    assert (spiked.probs[:, 1] < -110).all()
    assert spiked.probs.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_narrow_head(dtype):
    hidden, scale = rows_of(3, 64), (torch.rand(100, device=DEVICE) + 0.1) * 0.004
    head = torch.randint(-127, 128, (100, 64), device=DEVICE).to(dtype)
    temperature = torch.tensor([0.5, 1.0, 9.0], device=DEVICE)
    options: dict[str, Any] = {"head_scale": scale, "temperature": temperature}
    out = reduced_vocab_topk(hidden, head, 6, **options, out=poisoned(3, 6))
    assert_right(out, hidden, head.float(), scale, temperature)


def test_every_fp8_value_is_read_right():
    """One-hot rows of hidden pick one weight each, so that the scores are the weights."""
    values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    values = values[~values.float().isnan()].to(DEVICE)
    head = torch.zeros(len(values), 16, device=DEVICE).to(torch.float8_e4m3fn)
    head[:, 3] = values
    hidden = torch.zeros(1, 16, dtype=FP16, device=DEVICE)
    hidden[:, 3] = 1
    scale = torch.ones(len(values), device=DEVICE)
    out = reduced_vocab_topk(hidden, head, 64, head_scale=scale, log_probs=True)
    expected = values.float().sort(descending=True, stable=True)
    assert (out.token_ids[0] == expected.indices[:64]).all()
    torch.testing.assert_close(out.probs[0] + out.lse, expected.values[:64], rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("int_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("narrow", [False, True])
def test_gathered_rows_equal_copied_rows(int_dtype, narrow):
    hidden, full, row_ids = rows_of(3, 64), rows_of(300, 64), some_ids(90, 300)
    scale = None
    if narrow:
        scale, full = torch.rand(90, device=DEVICE), (full * 10).to(torch.int8)
    options: dict[str, Any] = {"head_scale": scale}
    gathered = reduced_vocab_topk(
        hidden, full, 5, row_ids=row_ids.to(int_dtype), out=poisoned(3, 5), **options
    )
    copied = reduced_vocab_topk(hidden, full[row_ids], 5, token_map=row_ids, **options)
    for got, expected in zip(gathered, copied, strict=True):
        assert (got == expected).all()
    token_map = some_ids(90)
    mapped = reduced_vocab_topk(hidden, full, 5, row_ids=row_ids, token_map=token_map, **options)
    at = (copied.token_ids[..., None] == row_ids).int().argmax(-1)
    assert (mapped.token_ids == token_map[at]).all()


@pytest.mark.parametrize("residual_dtype", [None, FP16, torch.float32], ids=str)
def test_fused_norm(residual_dtype):
    hidden, head = rows_of(3, 100, stride=128), rows_of(80, 100)
    weight = torch.rand(100, device=DEVICE).to(FP16)
    residual = None if residual_dtype is None else rows_of(3, 100, residual_dtype, stride=112)
    total = hidden.double() if residual is None else hidden.double() + residual.double()
    norm = FinalNorm(weight, 1e-5, residual)
    workspace = allocate_workspace(3, 80, 100, dtype=FP16, device=DEVICE)
    workspace.normed.fill_(math.nan)
    out = reduced_vocab_topk(hidden, head, 4, norm=norm, workspace=workspace, out=poisoned(3, 4))
    scale = torch.rsqrt(total.square().mean(1, keepdim=True) + 1e-5)
    truth = total * scale * weight.double()
    in_torch = torch.nn.functional.rms_norm(total.to(FP16), (100,), weight, 1e-5)
    verdict = no_worse_than_torch(workspace.normed, in_torch, truth)
    assert verdict.ok, verdict.why
    assert_right(out, workspace.normed, head)
    if residual is not None:
        assert (residual == total.to(residual_dtype)).all()


def test_fused_norm_of_small_rows_adds_eps():
    hidden, head = rows_of(2, 64) * 1e-3, rows_of(20, 64)
    weight = torch.ones(64, dtype=FP16, device=DEVICE)
    workspace = allocate_workspace(2, 20, 64, dtype=FP16, device=DEVICE)
    reduced_vocab_topk(hidden, head, 1, norm=FinalNorm(weight, 1e-5), workspace=workspace)
    x = hidden.double()
    truth = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5)
    torch.testing.assert_close(workspace.normed.double(), truth, rtol=1e-3, atol=0)


def test_reference_agrees():
    hidden, full, row_ids = rows_of(3, 64), rows_of(300, 64), some_ids(90, 300)
    temperature = torch.tensor([0.5, 1.0, 2.0], device=DEVICE)
    residual = rows_of(3, 64)
    ours, theirs = residual.clone(), residual.clone()
    weight = torch.rand(64, device=DEVICE).to(FP16)
    options: dict[str, Any] = {"row_ids": row_ids, "temperature": temperature, "log_probs": True}
    out = reduced_vocab_topk(hidden, full, 5, norm=FinalNorm(weight, 1e-5, ours), **options)
    reference = reduced_vocab_topk_reference(
        hidden, full, 5, norm=FinalNorm(weight, 1e-5, theirs), out=poisoned(3, 5), **options
    )
    assert (out.token_ids == reference.token_ids).all()
    torch.testing.assert_close(out.probs, reference.probs, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out.lse, reference.lse, rtol=1e-5, atol=1e-4)
    assert (ours == theirs).all()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("k", [1, 4, 33])
def test_all_equal(k, config):
    hidden, head, ids = rows_of(2, 32).zero_(), rows_of(100, 32), some_ids(100)
    out = reduced_vocab_topk(hidden, head, k, token_map=ids, out=poisoned(2, k), config=config)
    assert (out.token_ids == ids.sort().values[:k]).all()
    torch.testing.assert_close(out.probs, torch.full_like(out.probs, 0.01), rtol=1e-6, atol=0)
    torch.testing.assert_close(out.lse, torch.full_like(out.lse, math.log(100)))


def test_zeros_of_either_sign_are_equal():
    hidden = torch.zeros(1, 16, dtype=FP16, device=DEVICE)
    scale = torch.ones(40, device=DEVICE)
    scale[::3] = -1.0
    head = torch.ones(40, 16, dtype=torch.int8, device=DEVICE)
    out = reduced_vocab_topk(hidden, head, 20, head_scale=scale)
    assert out.token_ids[0].tolist() == list(range(20))


def test_one_spike():
    hidden, head = rows_of(2, 32), rows_of(200, 32)
    hidden[:, 0], head[:, 0], head[150, 0] = 1, 0, 1000
    out = reduced_vocab_topk(hidden, head, 3, out=poisoned(2, 3))
    assert (out.token_ids[:, 0] == 150).all()
    assert (out.probs[:, 0] == 1).all()
    assert (out.probs[:, 1:] == 0).all()
    hidden /= 200
    out = reduced_vocab_topk(hidden, head, 3, out=poisoned(2, 3))
    assert_right(out, hidden, head)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("at", [0, 63, 99])
def test_best_of_a_row_in_one_slice(at, config):
    """All of the top-k sit in one slice, or one in each: the merge asks as often as needed."""
    hidden = torch.ones(1, 16, dtype=FP16, device=DEVICE)
    scores = torch.arange(100, device=DEVICE).roll(at)
    head = torch.zeros(100, 16, dtype=FP16, device=DEVICE)
    head[:, 0] = scores
    out = reduced_vocab_topk(hidden, head, 30, out=poisoned(1, 30), config=config)
    assert (out.token_ids[0] == scores.argsort(descending=True)[:30]).all()


def test_identical_ids_for_every_launch_configuration():
    """Small integers: every score is exact, and there are many ties."""
    hidden = torch.randint(-2, 3, (5, 64), device=DEVICE).to(FP16)
    head = torch.randint(-1, 2, (333, 64), device=DEVICE).to(FP16)
    ids = some_ids(333)
    logits = hidden.double() @ head.double().T
    by_id = ids.argsort()
    order = by_id[logits[:, by_id].argsort(dim=1, descending=True, stable=True)]
    for config in CONFIGS:
        out = reduced_vocab_topk(
            hidden, head, 20, token_map=ids, out=poisoned(5, 20), config=config
        )
        assert (out.token_ids == ids[order[:, :20]]).all(), config
        torch.testing.assert_close(out.lse.double(), logits.logsumexp(1), rtol=1e-6, atol=0)
        expected = logits.softmax(1).gather(1, order[:, :20])
        torch.testing.assert_close(out.probs.double(), expected, rtol=2e-5, atol=0)


def test_crowded_slices_of_a_long_vocabulary():
    """More slices than one warp merges; most of the top-k sit in a few, with ties, ids unsorted."""
    hidden = torch.ones(2, 16, dtype=FP16, device=DEVICE)
    hidden[1] = -1
    head = torch.zeros(17_000, 16, dtype=FP16, device=DEVICE)
    head[:, 0] = torch.randint(-20, 21, (17_000,), device=DEVICE)
    head[400:440, 0] = torch.randint(21, 40, (40,), device=DEVICE).to(FP16)
    head[16_990:, 0] = torch.randint(-40, -20, (10,), device=DEVICE).to(FP16)
    ids = some_ids(17_000)
    out = reduced_vocab_topk(
        hidden, head, 64, token_map=ids, out=poisoned(2, 64), config=LaunchConfig(16, 16, 1, 1)
    )
    by_id = ids.argsort()
    logits = exact(hidden, head)[:, by_id]
    order = by_id[logits.argsort(dim=1, descending=True, stable=True)[:, :64]]
    assert (out.token_ids == ids[order]).all()


def test_nan_counts_as_the_largest_score():
    hidden, head = rows_of(3, 32), rows_of(100, 32)
    head[[70, 7]] = math.nan
    out = reduced_vocab_topk(hidden, head, 4, out=poisoned(3, 4))
    clean = rows_of(3, 32), torch.cat([head[:7], head[8:70], head[71:]])
    assert out.probs.isnan().all()
    assert out.lse.isnan().all()
    assert (out.token_ids[:, :2] == torch.tensor([7, 70], device=DEVICE)).all()
    kept = torch.tensor([i for i in range(100) if i not in (7, 70)], device=DEVICE)
    best = kept[logits_of(hidden, clean[1]).argmax(1)]
    assert (out.token_ids[:, 2] == best).all()


def test_nan_counts_as_the_largest_score_whatever_its_sign():
    scale = torch.ones(40, device=DEVICE)
    scale.view(torch.int32)[[9, 30]] = torch.tensor([-1, 0x7FC00000], dtype=torch.int32).to(DEVICE)
    head = torch.ones(40, 16, dtype=torch.int8, device=DEVICE)
    out = reduced_vocab_topk(ones(1, 16), head, 3, head_scale=scale, out=poisoned(1, 3))
    assert out.token_ids[0].tolist() == [9, 30, 0]


def test_a_nan_row_of_hidden_leaves_other_rows_alone():
    hidden, head = rows_of(3, 32), rows_of(100, 32)
    hidden[1, 5] = math.nan
    out = reduced_vocab_topk(hidden, head, 4, out=poisoned(3, 4))
    assert out.token_ids[1].tolist() == [0, 1, 2, 3]
    assert out.probs[1].isnan().all()
    assert out.lse[1].isnan()
    good = torch.tensor([0, 2], device=DEVICE)
    rest = TopK(*(t[good] for t in out))
    assert_right(rest, hidden[good], head)


def test_infinities():
    hidden = torch.zeros(3, 16, dtype=FP16, device=DEVICE)
    head = torch.zeros(100, 16, dtype=FP16, device=DEVICE)
    head[:, 0], head[:, 1] = -1, torch.arange(100, device=DEVICE) / 64
    head[[30, 80], 0] = 1
    hidden[0, 0], hidden[0, 1] = math.inf, 1  # two +inf scores, the others -inf
    hidden[1, 1] = 1
    hidden[2, 2] = -math.inf
    head[:, 2] = 1  # row 2: nothing but -inf; 0 · inf must not occur in the others
    hidden[:2, 2] = 0
    out = reduced_vocab_topk(hidden, head, 4, out=poisoned(3, 4))
    assert out.token_ids[0].tolist() == [30, 80, 0, 1]
    assert out.probs[0].isnan().all()
    assert out.lse[0].isnan()
    assert out.token_ids[1].tolist() == [99, 98, 97, 96]
    assert out.probs[1].isfinite().all()
    assert out.token_ids[2].tolist() == [0, 1, 2, 3]
    assert out.probs[2].isnan().all()
    assert out.lse[2] == -math.inf


def test_some_scores_minus_infinity():
    """Masked ids have probability 0 and come last, wherever whole slices are masked."""
    hidden = torch.ones(1, 16, dtype=FP16, device=DEVICE)
    head = torch.zeros(200, 16, dtype=FP16, device=DEVICE)
    head[:, 0] = -math.inf
    head[[3, 150], 0] = torch.tensor([1.0, 2.0], dtype=FP16, device=DEVICE)
    out = reduced_vocab_topk(hidden, head, 4, out=poisoned(1, 4))
    assert out.token_ids[0].tolist() == [150, 3, 0, 1]
    expected = torch.tensor([2.0, 1.0, -math.inf, -math.inf], device=DEVICE).softmax(0)
    torch.testing.assert_close(out.probs[0], expected)


@pytest.mark.parametrize("bad", [-1, 300, 2**40, -(2**40)])
def test_a_row_that_the_head_does_not_have_is_nan(bad):
    """Of memory outside the head nothing is read."""
    hidden, full, row_ids = rows_of(3, 64), rows_of(300, 64), some_ids(90, 300)
    row_ids[17] = bad
    ids = some_ids(90)
    out = reduced_vocab_topk(
        hidden, full, 4, row_ids=row_ids, token_map=ids, log_probs=True, out=poisoned(3, 4)
    )
    assert out.probs.isnan().all()
    assert out.lse.isnan().all()
    assert (out.token_ids[:, 0] == ids[17]).all()
    row_ids[17] = row_ids[3]
    truth = exact(hidden, full[row_ids])
    truth[:, 17] = -math.inf
    assert (out.token_ids[:, 1] == ids[truth.argmax(1)]).all()


def test_scales_of_zero_nan_and_infinity():
    hidden, head = ones(1, 16), ones(40, 16, dtype=torch.int8)
    scale = torch.zeros(40, device=DEVICE)
    out = reduced_vocab_topk(hidden, head, 3, head_scale=scale, out=poisoned(1, 3))
    assert out.token_ids[0].tolist() == [0, 1, 2]
    torch.testing.assert_close(out.probs, torch.full_like(out.probs, 1 / 40))
    for bad in (math.nan, math.inf):
        scale[[33, 8]] = bad
        out = reduced_vocab_topk(hidden, head, 3, head_scale=scale, out=poisoned(1, 3))
        assert out.token_ids[0].tolist() == [8, 33, 0]
        assert out.probs.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_nan_weights_of_an_fp8_head(bits):
    """The interpreter reads these bits as a number."""
    head = ones(40, 16).to(torch.float8_e4m3fn)
    head.view(torch.uint8)[[30, 9], 5] = bits
    scale = torch.ones(40, device=DEVICE)
    for dtype in DTYPES:
        hidden = ones(1, 16, dtype=dtype)
        out = reduced_vocab_topk(hidden, head, 3, head_scale=scale, out=poisoned(1, 3))
        assert out.token_ids[0].tolist() == [9, 30, 0]
        assert out.probs.isnan().all()


def test_one_element_of_any_stride():
    """The stride of a dimension with one element says nothing."""
    hidden, head = rows_of(1, 3).T, rows_of(50, 1)
    temperature = torch.tensor([2.0, 9.0, 9.0], device=DEVICE)[::3]
    out = reduced_vocab_topk(hidden, head, 3, out=poisoned(3, 3))
    assert_right(out, hidden.contiguous(), head)
    hidden, head = rows_of(1, 32), rows_of(50, 32)
    out = reduced_vocab_topk(hidden, head, 3, temperature=temperature, out=poisoned(1, 3))
    assert_right(out, hidden, head, temperature=temperature)


def test_a_residual_that_is_hidden_itself():
    hidden, head, weight = rows_of(2, 64), rows_of(100, 64), torch.ones(64, device=DEVICE)
    doubled = (2 * hidden.double()).to(FP16)
    out = reduced_vocab_topk(hidden, head, 5, norm=FinalNorm(weight, 1e-5, hidden))
    apart = reduced_vocab_topk(doubled, head, 5, norm=FinalNorm(weight, 1e-5))
    assert (hidden == doubled).all()
    assert all((a == b).all() for a, b in zip(out, apart, strict=True))


def test_no_rows():
    out = reduced_vocab_topk(rows_of(0, 32), rows_of(100, 32), 4)
    assert [tuple(t.shape) for t in out] == [(0, 4), (0, 4), (0,)]
    state = reduced_vocab_topk_shard(rows_of(0, 32), rows_of(100, 32), 4)
    assert tuple(state.shape) == (0, 5)
    assert tuple(merge_shards(state[None]).probs.shape) == (0, 4)


def test_workspace_and_outputs_are_used_again():
    workspace = allocate_workspace(8, 100, 32, dtype=FP16, device=DEVICE)
    out = None
    for rows, k in ((8, 6), (3, 6), (8, 2)):
        workspace.scores.fill_(math.nan)
        workspace.bests.fill_(-1)
        hidden, head = rows_of(rows, 32), rows_of(100, 32)
        out = poisoned(rows, k)
        got = reduced_vocab_topk(hidden, head, k, workspace=workspace, out=out)
        assert got is out
        assert_right(out, hidden, head)


@pytest.mark.parametrize("cuts", [(100,), (37,), (10, 20, 64)])
@pytest.mark.parametrize("config", CONFIGS[1:3], ids=str)
def test_shards_merge_to_the_whole(cuts, config):
    hidden = torch.randint(-2, 3, (3, 32), device=DEVICE).to(FP16)
    head = torch.randint(-1, 2, (200, 32), device=DEVICE).to(FP16)
    ids, k = some_ids(200), 9
    whole = reduced_vocab_topk(hidden, head, k, token_map=ids)
    edges = (0, *cuts, 200)
    states = torch.stack([
        reduced_vocab_topk_shard(hidden, head[a:b], k, token_map=ids[a:b], config=config)
        for a, b in pairwise(edges)
    ])  # fmt: skip
    merged = merge_shards(states, out=poisoned(3, k))
    assert (merged.token_ids == whole.token_ids).all()
    torch.testing.assert_close(merged.probs, whole.probs, rtol=1e-5, atol=0)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=1e-6, atol=0)
    logs = merge_shards(states, log_probs=True)
    torch.testing.assert_close(logs.probs.exp(), whole.probs, rtol=1e-5, atol=0)


def test_shard_of_nothing_but_minus_infinity():
    hidden = torch.ones(1, 16, dtype=FP16, device=DEVICE)
    head = torch.zeros(40, 16, dtype=FP16, device=DEVICE)
    head[:20, 0] = -math.inf
    ids = torch.arange(40, device=DEVICE)
    states = torch.stack([
        reduced_vocab_topk_shard(hidden, head[a : a + 20], 3, token_map=ids[a : a + 20])
        for a in (0, 20)
    ])  # fmt: skip
    merged = merge_shards(states)
    assert merged.token_ids[0].tolist() == [20, 21, 22]
    torch.testing.assert_close(merged.probs, torch.full_like(merged.probs, 0.05))


def test_offsets_beyond_two_to_the_31():
    """Rows gathered from both ends of a head of more than 2**31 elements, hidden rows as far apart.

    The memory between is never touched.
    """
    width = 64
    total = 2**31 // width + 50
    full = torch.empty(total, width, dtype=torch.int8, device=DEVICE)
    row_ids = torch.cat([torch.arange(10), torch.arange(total - 40, total)]).to(DEVICE)
    full[row_ids] = torch.randint(-9, 10, (50, width), device=DEVICE).to(torch.int8)
    far = torch.empty(2**31 + 128, dtype=FP16, device=DEVICE).as_strided((2, width), (2**31, 1))
    far.copy_(torch.randn(2, width))
    scale = torch.rand(50, device=DEVICE) * 0.02
    out = reduced_vocab_topk(far, full, 5, row_ids=row_ids, head_scale=scale, out=poisoned(2, 5))
    assert_right(out, far.clone(), full[row_ids].float(), scale, token_ids=row_ids)


def ones(*shape, dtype=FP16):
    return torch.ones(*shape, dtype=dtype, device=DEVICE)


def scratch(**replaced):
    return allocate_workspace(2, 20, 8, dtype=FP16, device=DEVICE)._replace(**replaced)


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (ValueError, "k is 0", lambda: (ones(1, 8), ones(20, 8), 0), {}),
        (ValueError, "k is 65", lambda: (ones(1, 8), ones(90, 8), 65), {}),
        (TypeError, "k is 2.0", lambda: (ones(1, 8), ones(20, 8), 2.0), {}),
        (TypeError, "k is None", lambda: (ones(1, 8), ones(20, 8), None), {}),
        (TypeError, "hidden is a list", lambda: ([[1.0]], ones(20, 8), 2), {}),
        (TypeError, "head is a NoneType", lambda: (ones(1, 8), None, 2), {}),
        (ValueError, "the 0 ids", lambda: (ones(1, 8), ones(0, 8), 1), {}),
        (ValueError, "the 20 ids", lambda: (ones(1, 8), ones(20, 8), 21), {}),
        (ValueError, "2-D", lambda: (ones(8), ones(20, 8), 2), {}),
        (ValueError, "head is", lambda: (ones(1, 8), ones(20, 9), 2), {}),
        (ValueError, "stride", lambda: (ones(8, 2).T, ones(20, 8), 2), {}),
        (TypeError, "hidden is", lambda: (ones(1, 8).float(), ones(20, 8), 2), {}),
        (TypeError, "head is", lambda: (ones(1, 8), ones(20, 8).float(), 2), {}),
        (
            ValueError,
            "int8 head needs head_scale",
            lambda: (ones(1, 8), ones(20, 8, dtype=torch.int8), 2),
            {},
        ),
        (
            ValueError,
            "float16 head takes no head_scale",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"head_scale": lambda: ones(20, dtype=torch.float32)},
        ),
        (
            ValueError,
            "token_map",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"token_map": lambda: torch.arange(19, device=DEVICE)},
        ),
        (
            TypeError,
            "row_ids",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"row_ids": lambda: ones(5, dtype=torch.float32)},
        ),
        (
            ValueError,
            r"row_ids is \(\), expected",
            lambda: (ones(1, 8), ones(20, 8), 1),
            {"row_ids": lambda: torch.tensor(3, device=DEVICE)},
        ),
        (
            ValueError,
            r"row_ids is \(2, 2\)",
            lambda: (ones(1, 8), ones(20, 8), 1),
            {"row_ids": lambda: torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)},
        ),
        (
            ValueError,
            "head has no rows",
            lambda: (ones(1, 8), ones(0, 8), 1),
            {"row_ids": lambda: torch.arange(3, device=DEVICE)},
        ),
        (
            TypeError,
            "row_ids is a list",
            lambda: (ones(1, 8), ones(20, 8), 1),
            {"row_ids": lambda: [1, 2]},
        ),
        (
            TypeError,
            "temperature is a float",
            lambda: (ones(1, 8), ones(20, 8), 1),
            {"temperature": lambda: 0.5},
        ),
        (
            ValueError,
            r"temperature is \(2, 1\)",
            lambda: (ones(2, 8), ones(20, 8), 1),
            {"temperature": lambda: ones(2, 1, dtype=torch.float32)},
        ),
        (
            TypeError,
            "norm is a Tensor; give a FinalNorm",
            lambda: (ones(1, 8), ones(20, 8), 1),
            {"norm": lambda: ones(8)},
        ),
        (
            ValueError,
            "eps is nan",
            lambda: (ones(1, 8), ones(20, 8), 1),
            {"norm": lambda: FinalNorm(ones(8), math.nan)},
        ),
        (
            TypeError,
            "eps is tensor",
            lambda: (ones(1, 8), ones(20, 8), 1),
            {"norm": lambda: FinalNorm(ones(8), torch.tensor(1e-5))},  # pyright: ignore[reportArgumentType]
        ),
        (
            ValueError,
            "rows of norm.residual share memory",
            lambda: (ones(2, 8), ones(20, 8), 1),
            {"norm": lambda: FinalNorm(ones(8), 1e-5, ones(1, 8).expand(2, 8))},
        ),
        (
            TypeError,
            "out is a tuple; give a TopK",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"out": lambda: tuple(allocate_output(1, 2, DEVICE))},
        ),
        (
            TypeError,
            "out.token_ids is torch.int32",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"out": lambda: poisoned(1, 2)._replace(token_ids=ones(1, 2).int())},
        ),
        (
            ValueError,
            "out.lse has stride 0",
            lambda: (ones(2, 8), ones(20, 8), 2),
            {"out": lambda: poisoned(2, 2)._replace(lse=poisoned(1, 2).lse.expand(2))},
        ),
        (
            TypeError,
            "workspace is a tuple; give a Workspace",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"workspace": lambda: tuple(scratch())},
        ),
        (
            ValueError,
            r"workspace.bests is \(64, 64\)",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"workspace": lambda: scratch(bests=ones(64, 64).long())},
        ),
        (
            ValueError,
            "workspace.bests holds 4",
            lambda: (ones(9, 8), ones(20, 8), 2),
            {"workspace": scratch},
        ),
        (
            ValueError,
            r"workspace.normed is \(64,\)",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {
                "norm": lambda: FinalNorm(ones(8), 1e-5),
                "workspace": lambda: scratch(normed=ones(64)),
            },
        ),
        (
            TypeError,
            "config is a tuple",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"config": lambda: (64, 32, 1, 1)},
        ),
        (
            ValueError,
            "block_v=48",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"config": lambda: LaunchConfig(48, 32, 1, 1)},
        ),
        (
            ValueError,
            "warps=3",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"config": lambda: LaunchConfig(64, 32, 3, 1)},
        ),
        (
            ValueError,
            "65536 slices; at most 65535",
            lambda: (ones(1, 8), ones(1, 8).expand(65_536 * 16, 8), 1),
            {"config": lambda: LaunchConfig(16, 32, 1, 1)},
        ),
        (
            TypeError,
            "temperature",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"temperature": lambda: ones(1)},
        ),
        (
            ValueError,
            "norm.weight",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"norm": lambda: FinalNorm(ones(9), 1e-5)},
        ),
        (
            ValueError,
            "norm.residual",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"norm": lambda: FinalNorm(ones(8), 1e-5, ones(2, 8))},
        ),
        (
            ValueError,
            "out.probs",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"out": lambda: allocate_output(1, 3, DEVICE)},
        ),
        (
            ValueError,
            "workspace.scores holds 3",
            lambda: (ones(1, 8), ones(20, 8), 5),
            {"workspace": lambda: scratch(scores=torch.empty(3, device=DEVICE))},
        ),
        (
            TypeError,
            "workspace.scores is torch.float16",
            lambda: (ones(1, 8), ones(20, 8), 5),
            {"workspace": lambda: scratch(scores=ones(999))},
        ),
        (
            TypeError,
            "workspace.bests is torch.int32",
            lambda: (ones(1, 8), ones(20, 8), 5),
            {"workspace": lambda: scratch(bests=ones(999, dtype=torch.int32))},
        ),
        (
            ValueError,
            r"workspace.bests is .* with strides \(2,\)",
            lambda: (ones(1, 8), ones(20, 8), 5),
            {"workspace": lambda: scratch(bests=ones(999, dtype=torch.int64)[::2])},
        ),
        (
            TypeError,
            "workspace.normed is torch.bfloat16",
            lambda: (ones(1, 8), ones(20, 8), 5),
            {
                "norm": lambda: FinalNorm(ones(8), 1e-5),
                "workspace": lambda: scratch(normed=ones(1, 8, dtype=torch.bfloat16)),
            },
        ),
        (
            ValueError,
            r"workspace.normed is .* with strides \(12, 1\)",
            lambda: (ones(2, 8), ones(20, 8), 5),
            {
                "norm": lambda: FinalNorm(ones(8), 1e-5),
                "workspace": lambda: scratch(normed=ones(2, 12)[:, :8]),
            },
        ),
        (ValueError, "head is on meta", lambda: (ones(1, 8), ones(20, 8).to("meta"), 2), {}),
        (
            ValueError,
            "norm.residual is on meta",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"norm": lambda: FinalNorm(ones(8), 1e-5, ones(1, 8).to("meta"))},
        ),
        (
            ValueError,
            "out.probs is on meta",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"out": lambda: allocate_output(1, 2, "meta")},
        ),
        (
            ValueError,
            "workspace.scores is on meta",
            lambda: (ones(1, 8), ones(20, 8), 2),
            {"workspace": lambda: allocate_workspace(1, 20, 8, dtype=FP16, device="meta")},
        ),
    ],
)
def test_bad_input(error, message, arguments, options):
    with pytest.raises(error, match=message):
        reduced_vocab_topk(*arguments(), **{name: make() for name, make in options.items()})


def test_bad_shard_states():
    with pytest.raises(ValueError, match="expected"):
        merge_shards(torch.zeros(2, 5, dtype=torch.int64, device=DEVICE))
    with pytest.raises(TypeError, match="states"):
        merge_shards(torch.zeros(2, 1, 5, device=DEVICE))
    state = torch.zeros(2, 12, dtype=torch.int64, device=DEVICE)[:, :5]
    with pytest.raises(ValueError, match=r"out has strides \(12, 1\)"):
        reduced_vocab_topk_shard(ones(2, 8), ones(20, 8), 4, out=state)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 10, 64])
@pytest.mark.parametrize("rows", [1, 16, 33, 130])
def test_real_sizes(rows, k):
    """A third of a real head, every slice in flight at once, V odd."""
    hidden, head = rows_of(rows, 4096, torch.bfloat16), rows_of(47149, 4096, torch.bfloat16)
    head *= 0.02
    ids = some_ids(47149, 151936)
    out = reduced_vocab_topk(hidden, head, k, token_map=ids, out=poisoned(rows, k))
    assert_right(out, hidden, head, token_ids=ids)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True])
def test_graph_replay_with_changed_inputs_equals_eager(norm):
    hidden, head = rows_of(7, 2048, torch.bfloat16), rows_of(5000, 2048, torch.bfloat16)
    weight = torch.rand(2048, device=DEVICE).bfloat16()
    workspace = allocate_workspace(7, 5000, 2048, dtype=torch.bfloat16, device=DEVICE)
    out = poisoned(7, 10)
    options: dict[str, Any] = {"norm": FinalNorm(weight, 1e-5)} if norm else {}

    def call(out):
        return reduced_vocab_topk(hidden, head, 10, workspace=workspace, out=out, **options)

    call(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # back to back: the next call starts while this one's merge runs
            call(out)
    for _ in range(5):
        hidden.copy_(torch.randn_like(hidden))
        head.copy_(torch.randn_like(head) * 0.05)
        for tensor, poison in zip(out, poisoned(7, 10), strict=True):
            tensor.copy_(poison)
        graph.replay()
        replayed = TopK(*(t.clone() for t in out))
        eager = call(poisoned(7, 10))
        for got, expected in zip(replayed, eager, strict=True):
            assert (got == expected).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_tied_ids_in_every_shipped_configuration(dtype):
    """Scores of small integers are exact whatever the tiles are, so the ids must be equal."""
    from frspec_kernels.reduced_topk_launch import shipped_configs

    hidden = torch.randint(-2, 3, (20, 1024), device=DEVICE).bfloat16()
    head = torch.randint(-1, 2, (9001, 1024), device=DEVICE).to(dtype)
    scale = None if dtype == torch.bfloat16 else torch.full((9001,), 0.25, device=DEVICE)
    ids = some_ids(9001)
    truth = exact(hidden, head.float(), scale)
    by_id = ids.argsort()
    order = by_id[truth[:, by_id].argsort(dim=1, descending=True, stable=True)]
    for config in shipped_configs():
        out = reduced_vocab_topk(
            hidden, head, 20, token_map=ids, head_scale=scale, out=poisoned(20, 20), config=config
        )
        assert (out.token_ids == ids[order[:, :20]]).all(), config
        torch.testing.assert_close(out.lse.double(), truth.logsumexp(1), rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_random_scores_in_every_shipped_configuration(dtype):
    from frspec_kernels.reduced_topk_launch import shipped_configs

    hidden, head = rows_of(20, 2048, torch.bfloat16), rows_of(9001, 2048, torch.bfloat16) * 0.06
    scale = None if dtype == torch.bfloat16 else torch.full((9001,), 0.01, device=DEVICE)
    head = head if scale is None else (head * 100).clamp(-127, 127).to(dtype)
    first = None
    for config in shipped_configs():
        out = reduced_vocab_topk(
            hidden, head, 20, head_scale=scale, out=poisoned(20, 20), config=config
        )
        assert_right(out, hidden, head.float(), scale)
        first = first or out
        assert (out.token_ids == first.token_ids).float().mean() > 0.99  # others: within rounding
        torch.testing.assert_close(out.probs, first.probs, rtol=1e-4, atol=0)
