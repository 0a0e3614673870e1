"""A ranked map of the whole vocabulary for a chain model, whose first ids cover as real maps do.

The chain model accepts whatever its draft may propose, so its accept length by map size follows
from which of the generated tokens the map's first ids hold. Here they hold the shares that a map
ranked by a model's own text holds of what it writes.
"""

import random
from collections.abc import Mapping

from bench.serving.chain import Chain

# Share of generated tokens within the first so many ids: a vocabulary of 128k, text like that
# which ranked it.
COVERAGE = {8_192: 0.92, 16_384: 0.96, 32_768: 0.985, 65_536: 0.993}


def graded_ranking(
    chain: Chain,
    segments: int,
    length: int,
    coverage: Mapping[int, float] = COVERAGE,
    seed: int = 3,
) -> list[int]:
    """All token ids, ranked to cover ``length`` tokens of each of the first ``segments`` so.

    Whether a token lies within a size is drawn for each token alone, as independent as the model
    of `frspec choose` assumes.

    Raises:
        ValueError: the segments hold more tokens than the smallest size has room for.
    """
    draw = random.Random(seed)
    vocab = len(chain.order)
    sizes = [size for size in sorted(coverage) if size < vocab] + [vocab]
    used = [token for s in range(segments) for token in chain.continuation(s, length)]
    buckets: list[list[int]] = [[] for _ in sizes]
    buckets[0] += [vocab - 2, vocab - 1]  # FRSPEC puts the special tokens into every map
    for token in sorted(set(used) - set(buckets[0])):
        chance = draw.random()
        held = [i for i, size in enumerate(sizes) if chance < coverage.get(size, 1.0)]
        buckets[held[0]].append(token)
    known = {token for bucket in buckets for token in bucket}
    others = [token for token in range(vocab) if token not in known]
    draw.shuffle(others)
    ranking: list[int] = []
    for size, bucket in zip(sizes, buckets, strict=True):
        room = size - len(ranking) - len(bucket)
        if room < 0:
            raise ValueError(f"{segments} segments hold more tokens than {size} ids have room for")
        bucket += [others.pop() for _ in range(room)]
        draw.shuffle(bucket)
        ranking += bucket
    return ranking
