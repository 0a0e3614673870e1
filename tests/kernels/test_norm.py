import math
import random

import numpy as np
import pytest
import torch

from bench.checks import no_worse_than_torch
from bench.providers import poisoned
from frspec_kernels import norm, norm_args

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 64), (3, 100), (2, 576), (5, 1), (1, 2880), (2, 4097)]


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _rows(rows, width, dtype, device, stride=None):
    """Random rows in a NaN-filled buffer, so that a read beyond a row's end shows."""
    buffer = torch.full((rows, stride or width), math.nan, dtype=dtype, device=device)
    buffer[:, :width] = torch.randn(rows, width, device=device)
    return buffer[:, :width]


def _assert_rms_norm(out, x, weight, gemma=False, eps=EPS):
    truth = norm.rms_norm_reference(x.double(), weight.double(), eps, gemma=gemma)
    scale = weight.double() + int(gemma)
    torchs = torch.nn.functional.rms_norm(x, x.shape[-1:], scale.to(x.dtype), eps)
    verdict = no_worse_than_torch(out, torchs, truth)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm(rows, width, dtype, device):
    x, weight = _rows(rows, width, dtype, device), _rows(1, width, dtype, device)[0]
    out = poisoned(rows, width, dtype=dtype, device=device)
    assert norm.rms_norm(x, weight, EPS, out=out) is out
    _assert_rms_norm(out, x, weight)


def test_rms_norm_allocates_without_out(device):
    x, weight = _rows(2, 64, torch.float32, device), _rows(1, 64, torch.float32, device)[0]
    _assert_rms_norm(norm.rms_norm(x, weight, EPS), x, weight)


def test_rms_norm_into_its_input(device):
    x, weight = _rows(2, 100, torch.float32, device), _rows(1, 100, torch.float32, device)[0]
    before = x.clone()
    norm.rms_norm(x, weight, EPS, out=x)
    _assert_rms_norm(x, before, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemma_scales_by_one_plus_weight(dtype, device):
    x = _rows(3, 96, dtype, device)
    weight = torch.randint(-4, 5, (96,), device=device).to(dtype) / 4  # 1 + weight is exact
    out = norm.rms_norm(x, weight, EPS, gemma=True)
    _assert_rms_norm(out, x, weight, gemma=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gemma_adds_one_in_float32(dtype, device):
    """1 + weight has more bits than the weight's type; fp32 rows show what is lost of them."""
    x = _rows(2, 96, torch.float32, device)
    weight = (torch.arange(96, device=device) / 4096).to(dtype)
    out = norm.rms_norm(x, weight, EPS, gemma=True)
    truth = norm.rms_norm_reference(x.double(), weight.double(), EPS, gemma=True)
    torch.testing.assert_close(out.double(), truth, rtol=1e-6, atol=0)


def test_strided_rows_leave_the_gaps_alone(device):
    x = _rows(3, 100, torch.float16, device, stride=133)
    weight = _rows(1, 100, torch.float16, device)[0]
    buffer = torch.full((3, 140), 7.0, dtype=torch.float16, device=device)
    norm.rms_norm(x, weight, EPS, out=buffer[:, :100])
    _assert_rms_norm(buffer[:, :100], x, weight)
    assert (buffer[:, 100:] == 7).all()


def test_weight_of_another_type(device):
    x = _rows(2, 64, torch.bfloat16, device)
    weight = _rows(1, 64, torch.float32, device)[0]
    truth = norm.rms_norm_reference(x.double(), weight.double(), EPS)
    verdict = no_worse_than_torch(norm.rms_norm(x, weight, EPS), truth.to(x.dtype), truth)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("value", [0.0, 1e-20, 3e4])
def test_equal_elements(value, device):
    x = torch.full((2, 64), value, device=device)
    weight = torch.ones(64, device=device)
    _assert_rms_norm(norm.rms_norm(x, weight, EPS), x, weight)


def test_a_spike_in_a_row_leaves_other_rows_alone(device):
    x, weight = _rows(3, 128, torch.float32, device), _rows(1, 128, torch.float32, device)[0]
    x[1, 17] = 1e15
    _assert_rms_norm(norm.rms_norm(x, weight, EPS), x, weight)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_stay_in_their_row(value, device):
    x, weight = _rows(3, 64, torch.float32, device), _rows(1, 64, torch.float32, device)[0]
    x[1, 5] = value
    out = norm.rms_norm(x, weight, EPS)
    expected = norm.rms_norm_reference(x, weight, EPS)
    assert torch.equal(out.isnan(), expected.isnan())
    assert out[1, 5].isnan()
    _assert_rms_norm(out[::2], x[::2], weight)


def test_empty_batch(device):
    weight = torch.ones(64, device=device)
    x = torch.empty(0, 64, device=device)
    assert norm.rms_norm(x, weight, EPS).shape == (0, 64)
    norm.add_rms_norm(x, x.clone(), weight, EPS)
    ids = torch.empty(0, dtype=torch.int64, device=device)
    out = norm.dual_norm_concat(ids, torch.ones(4, 64, device=device), x, weight, weight, EPS)
    assert out.shape == (0, 128)


def _assert_rounded_sum(out, plain, truth):
    """Exactly PyTorch's sum; the interpreter truncates to bf16 where a GPU rounds."""
    if out.device.type == "cuda" or out.dtype != torch.bfloat16:
        assert torch.equal(out, plain)
    verdict = no_worse_than_torch(out, plain, truth)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(dtype, gemma, device):
    x, residual = _rows(3, 576, dtype, device), _rows(3, 576, dtype, device, stride=600)
    weight = torch.randint(-4, 5, (576,), device=device).to(dtype) / 4
    truth = x.double() + residual.double()
    plain = x + residual
    norm.add_rms_norm(x, residual, weight, EPS, gemma=gemma)
    _assert_rounded_sum(residual, plain, truth)
    expected = norm.rms_norm_reference(truth, weight.double(), EPS, gemma=gemma)
    scale = (weight.double() + int(gemma)).to(dtype)
    torchs = torch.nn.functional.rms_norm(plain, (576,), scale, EPS)
    verdict = no_worse_than_torch(x, torchs, expected)
    assert verdict.ok, verdict.why


def test_add_rms_norm_normalises_the_sum_before_its_rounding(device):
    """256 + 0.9 is 256 in bf16 (spacing 2); only the unrounded sum keeps the ratio of the two."""
    x = torch.tensor([[0.9, 0.0]], dtype=torch.bfloat16, device=device)
    residual = torch.tensor([[256.0, 2.0]], dtype=torch.bfloat16, device=device)
    weight = torch.ones(2, device=device) * 1e3
    out = x.float()
    norm.add_rms_norm(out, residual, weight, 0.0)
    first = 256 + x[0, 0].item()
    assert residual.tolist() == [[256.0, 2.0]]
    exact = [first, 2.0] / np.sqrt(first**2 / 2 + 2)  # the rounded sum's 2 is 0.4% larger
    assert (out[0] / 1e3).tolist() == pytest.approx(exact.tolist(), rel=1e-6)


@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dual_norm_concat(dtype, id_dtype, device):
    embedding = _rows(11, 100, dtype, device, stride=112)
    hidden = _rows(4, 100, dtype, device, stride=300)
    left, right = (_rows(1, 100, dtype, device)[0] for _ in range(2))
    ids = torch.tensor([10, 0, 3, 3], dtype=id_dtype, device=device)
    out = poisoned(4, 200, dtype=dtype, device=device)
    norm.dual_norm_concat(ids, embedding, hidden, left, right, EPS, out=out)
    _assert_rms_norm(out[:, :100], embedding[ids.long()], left)
    _assert_rms_norm(out[:, 100:], hidden, right)


def test_dual_norm_concat_of_ids_outside_the_embedding_is_nan(device):
    embedding, hidden = torch.randn(5, 32, device=device), torch.randn(3, 32, device=device)
    weight = torch.ones(32, device=device)
    ids = torch.tensor([-1, 5, 4], device=device)
    out = norm.dual_norm_concat(ids, embedding, hidden, weight, weight, EPS)
    assert out[:2, :32].isnan().all()
    _assert_rms_norm(out[2:, :32], embedding[4:], weight)
    _assert_rms_norm(out[:, 32:], hidden, weight)


def test_references_agree_with_pytorch():
    x, residual = torch.randn(3, 40), torch.randn(3, 40)
    weight, table = torch.randn(40), torch.randn(6, 40)
    plain = torch.nn.functional.rms_norm
    torch.testing.assert_close(
        norm.rms_norm_reference(x, weight, EPS, gemma=True), plain(x, (40,), 1 + weight, EPS)
    )
    normed, total = norm.add_rms_norm_reference(x, residual, weight, EPS)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, plain(x + residual, (40,), weight, EPS))
    ids = torch.tensor([5, 0, 5])
    both = norm.dual_norm_concat_reference(ids, table, x, weight, 2 * weight, EPS)
    torch.testing.assert_close(both[:, :40], plain(table[ids], (40,), weight, EPS))
    torch.testing.assert_close(both[:, 40:], plain(x, (40,), 2 * weight, EPS))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(4)}, ValueError, "rows"),
        ({"x": torch.ones(2, 16_385)}, ValueError, "16384"),
        ({"x": torch.ones(2, 0)}, ValueError, "rows"),
        ({"x": torch.ones(8, 4).T}, ValueError, "contiguous"),
        ({"x": torch.ones(2, 8, dtype=torch.int32)}, TypeError, "int32"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x is \(\)"),
        ({"x": [[1.0]]}, TypeError, "x is a list"),
        ({"weight": None}, TypeError, "weight is a NoneType"),
        ({"eps": math.nan}, ValueError, "eps is nan; give 0 or more"),
        ({"eps": -1e-5}, ValueError, "eps is -1e-05"),
        ({"eps": torch.tensor(1e-5)}, TypeError, "eps is tensor"),
        ({"weight": torch.ones(7)}, ValueError, r"\(7,\)"),
        ({"weight": torch.ones(16)[::2]}, ValueError, "contiguous"),
        ({"weight": torch.ones(8, dtype=torch.float64)}, TypeError, "float64"),
        ({"weight": torch.ones(8, device="meta")}, ValueError, "meta"),
        ({"out": torch.ones(3, 8)}, ValueError, r"\(3, 8\)"),
        ({"out": torch.ones(1, 8).expand(2, 8)}, ValueError, "rows of out share memory"),
        ({"config": norm.LaunchConfig(4, 1)}, ValueError, "config.block is 4, a row has 8"),
        ({"config": norm.LaunchConfig(9, 1)}, ValueError, r"config is \(9, 1\); give powers"),
        ({"config": norm.LaunchConfig(8, 0)}, ValueError, r"config is \(8, 0\); give powers"),
    ],
)
def test_rms_norm_refuses(change, error, message):
    arguments = {"x": torch.ones(2, 8), "weight": torch.ones(8), "eps": EPS} | change
    with pytest.raises(error, match=message):
        norm.rms_norm(**arguments)


@pytest.mark.parametrize(("x_at", "out_at"), [(0, 4), (4, 0)])
def test_rms_norm_refuses_an_output_that_overlaps_its_input(x_at, out_at):
    buffer = torch.randn(3, 12)
    with pytest.raises(ValueError, match="out and x overlap in memory; give out its own"):
        norm.rms_norm(
            buffer[:, x_at : x_at + 8], torch.ones(8), EPS, out=buffer[:, out_at : out_at + 8]
        )


def test_rms_norm_refuses_an_output_one_row_further():
    buffer = torch.randn(4, 8)
    with pytest.raises(ValueError, match="out and x overlap"):
        norm.rms_norm(buffer[:3], torch.ones(8), EPS, out=buffer[1:])
    with pytest.raises(ValueError, match="out and x overlap"):
        norm.rms_norm(buffer[:2], torch.ones(8), EPS, out=buffer[::2])


def test_input_and_output_may_stand_side_by_side(device):
    buffer = torch.randn(3, 20, device=device)
    x, out, weight = buffer[:, 10:18], buffer[:, 2:10], torch.ones(8, device=device)
    norm.rms_norm(x, weight, EPS, out=out)
    _assert_rms_norm(out, x, weight)


def test_no_overlap_is_missed():
    """Against the sets of addresses, of random rows in one buffer."""
    pick, buffer = random.Random(3), torch.zeros(200)

    def rows_in_buffer():
        width = pick.randint(1, 8)
        shape, stride = (pick.randint(1, 4), width), (pick.randint(width, 12), 1)
        return buffer.as_strided(shape, stride, pick.randint(0, 60))

    def addresses(x):
        return [set(range(r, r + x.shape[1])) for r in range(x.storage_offset(), 200, x.stride(0))]

    refused = 0
    for _ in range(3000):
        out, other, in_place = rows_in_buffer(), rows_in_buffer(), pick.random() < 0.5
        written, read = addresses(out)[: len(out)], addresses(other)[: len(other)]
        harm = any(
            a & b and not (in_place and i == j and a == b)
            for i, a in enumerate(written)
            for j, b in enumerate(read)
        )
        try:
            norm_args.check_apart("out", out, "other", other, in_place=in_place)
        except ValueError:
            refused += 1
        else:
            assert not harm, (out.shape, out.stride(), other.shape, other.stride())
    assert 1000 < refused < 2500


def test_add_rms_norm_refuses_a_residual_that_is_its_input():
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="x and residual overlap in memory"):
        norm.add_rms_norm(x, x, torch.ones(8), EPS)


def test_dual_norm_concat_refuses_an_output_over_its_inputs():
    buffer, weight = torch.randn(4, 16), torch.ones(8)
    ids = torch.tensor([0, 1])
    for inputs in ((buffer[:, :8], torch.randn(2, 8)), (torch.randn(4, 8), buffer[:2, 8:])):
        with pytest.raises(ValueError, match=r"out and .* overlap in memory"):
            norm.dual_norm_concat(ids, *inputs, weight, weight, EPS, out=buffer[:2])


@pytest.mark.parametrize("bad", [2**40, -(2**40), 2**63 - 1, -(2**63)])
def test_dual_norm_concat_of_ids_far_outside_the_embedding_is_nan(bad, device):
    x, weight = torch.randn(2, 8, device=device), torch.ones(8, device=device)
    ids = torch.tensor([bad, 1], device=device)
    out = norm.dual_norm_concat(ids, x, x, weight, weight, EPS)
    assert out[0, :8].isnan().all()
    _assert_rms_norm(out[1:, :8], x[1:], weight)


def test_add_rms_norm_refuses_another_number_of_rows():
    with pytest.raises(ValueError, match="residual"):
        norm.add_rms_norm(torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), EPS)


def test_add_rms_norm_refuses_rows_that_overlap():
    with pytest.raises(ValueError, match="rows of residual share memory"):
        norm.add_rms_norm(torch.ones(2, 8), torch.ones(1, 8).expand(2, 8), torch.ones(8), EPS)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"token_ids": torch.zeros(2)}, TypeError, "float32"),
        ({"token_ids": torch.zeros(3, dtype=torch.int64)}, ValueError, "token_ids"),
        ({"token_ids": torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError, "meta"),
        ({"embedding": torch.ones(5, 9)}, ValueError, "embedding"),
        ({"embedding": torch.tensor(1.0)}, ValueError, r"embedding is \(\)"),
        ({"hidden": torch.tensor(1.0)}, ValueError, r"hidden is \(\)"),
        ({"token_ids": [0, 1]}, TypeError, "token_ids is a list"),
        ({"eps": -1.0}, ValueError, "eps is -1.0"),
        ({"embedding": torch.ones(0, 8)}, ValueError, "embedding has no rows"),
        ({"embed_weight": torch.ones(9)}, ValueError, "embed_weight"),
        ({"hidden_weight": torch.ones(9)}, ValueError, "hidden_weight"),
        ({"out": torch.ones(2, 8)}, ValueError, "out"),
    ],
)
def test_dual_norm_concat_refuses(change, error, message):
    arguments = {
        "token_ids": torch.zeros(2, dtype=torch.int64),
        "embedding": torch.ones(5, 8),
        "hidden": torch.ones(2, 8),
        "embed_weight": torch.ones(8),
        "hidden_weight": torch.ones(8),
        "eps": EPS,
    }
    with pytest.raises(error, match=message):
        norm.dual_norm_concat(**(arguments | change))


def test_launch_configs_hold_every_row():
    for rows in (1, 16, 64, 1024, 8192):
        for width in (1, 100, 576, 4096, 4097, 16_384):
            config = norm.launch_config(rows, width)
            assert width <= config.block < 2 * max(width, 32)
            assert config.num_warps in (1, 2, 4, 8, 16, 32)
            assert 32 * config.num_warps <= config.block


def test_compile_specs_cover_the_table():
    specs = norm.compile_specs()
    kernels = {spec.kernel.__name__ for spec in specs}
    assert kernels == {"rms_norm_kernel", "add_rms_norm_kernel", "dual_norm_concat_kernel"}
    shipped = {(spec.constexprs["BLOCK"], spec.num_warps) for spec in specs}
    for rows in (1, 16, 64, 511, 512, 4095, 4096, 8192):
        for width in (1, 33, 576, 2880, 4096, 5120, 16_384):
            assert norm.launch_config(rows, width) in shipped
    for spec in specs:
        names = {*spec.signature, *spec.constexprs}
        assert names == set(spec.kernel.arg_names)


@pytest.mark.parametrize("num_warps", [1, 8])
def test_any_launch_config_is_right(num_warps, device):
    x, weight = _rows(2, 300, torch.float32, device), _rows(1, 300, torch.float32, device)[0]
    config = norm.LaunchConfig(512, num_warps)
    _assert_rms_norm(norm.rms_norm(x, weight, EPS, config=config), x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16_383, 16_384])
def test_widest_rows(width, device):
    x = _rows(9, width, torch.bfloat16, device, stride=16_400)
    weight = _rows(1, width, torch.bfloat16, device)[0]
    _assert_rms_norm(norm.rms_norm(x, weight, EPS), x, weight)


@pytest.mark.gpu
@pytest.mark.slow
def test_offsets_beyond_32_bits(device):
    table = torch.empty(2**19 + 2, 4096, dtype=torch.bfloat16, device=device)
    table[-2:] = torch.randn(2, 4096, device=device)
    x, weight = table[-2:], torch.ones(4096, dtype=torch.bfloat16, device=device)
    rows = torch.as_strided(table, (2, 4096), ((2**19 + 1) * 4096, 1))
    rows[0] = x[0]
    _assert_rms_norm(norm.rms_norm(rows, weight, EPS), rows, weight)
    ids = torch.tensor([2**19, 2**19 + 1], device=device)
    out = norm.dual_norm_concat(ids, table, x, weight, weight, EPS)
    _assert_rms_norm(out[:, :4096], x, weight)


@pytest.mark.gpu
def test_graph_replay_with_changed_inputs_equals_eager(device):
    x, weight = _rows(4, 4096, torch.bfloat16, device), torch.ones(4096, device=device)
    residual = torch.zeros_like(x)
    out, both = torch.empty_like(x), poisoned(4, 8192, dtype=x.dtype, device=device)
    table, ids = _rows(7, 4096, x.dtype, device), torch.zeros(4, dtype=torch.int64, device=device)

    def call():
        norm.rms_norm(x, weight, EPS, out=out)
        norm.dual_norm_concat(ids, table, out, weight, weight, EPS, out=both)
        norm.add_rms_norm(out, residual, weight, EPS)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        ids.random_(7)
        residual.normal_()
        start = residual.clone()
        graph.replay()
        replayed = [t.clone() for t in (out, both, residual)]
        residual.copy_(start)
        call()
        for eager, replay in zip((out, both, residual), replayed, strict=True):
            assert torch.equal(eager, replay)
