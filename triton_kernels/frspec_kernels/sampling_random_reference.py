"""The random numbers of :mod:`frspec_kernels.sampling_random` in PyTorch, bit for bit the words."""

import torch
from torch import Tensor

DRAW, ACCEPT, RESIDUAL = 0, 1, 2

_LOW = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int | Tensor, int | Tensor]
) -> Tensor:
    """Philox-4x32-10 (Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405).

    Args:
        counter: four int64 tensors of one shape, values in [0, 2**32).
        key: two integers in [0, 2**32), or int64 tensors that broadcast against the counter.

    Returns:
        int64 ``[4, ...]``, values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return torch.stack([c0, c1, c2, c3])


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low words of 32-bit products; an int64 holds no 64-bit unsigned product."""
    upper = (a >> 16) * b + (((a & 0xFFFF) * b) >> 16)
    low = (((a & 0xFFFF) * b) & 0xFFFF) | ((upper & 0xFFFF) << 16)
    return upper >> 16, low


def words(
    seed: int | Tensor,
    lane: Tensor,
    position: int | Tensor,
    purpose: int,
    depth: int,
    branch: int | Tensor,
) -> Tensor:
    """int64 ``[4, ...]``, values in [0, 2**32), for an int64 ``lane``.

    ``seed``, ``position`` and ``branch`` may be int64 tensors that broadcast against it.
    """
    same = torch.zeros_like(lane)
    counter = (lane, same + (position & _LOW), same + (depth * 4 + purpose), same + branch)
    return philox(counter, (seed & _LOW, (seed >> 32) & _LOW))


def words_of_ids(
    seed: int | Tensor,
    ids: Tensor,
    position: int | Tensor,
    purpose: int,
    depth: int,
    branch: int | Tensor = 0,
) -> Tensor:
    """One word for each token id: int64 in the shape of ``ids``, values in [0, 2**32)."""
    four = words(seed, ids // 4, position, purpose, depth, branch)
    return four.gather(0, (ids % 4)[None])[0]


def uniform(word: Tensor) -> Tensor:
    """float64 in [0, 1): the float32 that a kernel makes of the word."""
    return (word >> 8).double() * 2.0**-24


def exponential(word: Tensor) -> Tensor:
    """float64 > 0 with the standard exponential distribution."""
    return -torch.log1p(-(word.double() + 0.5) * 2.0**-32)
