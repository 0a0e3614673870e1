"""What ``frspec choose`` predicts from the ends of a range of sizes, beside what was served."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from bench.serving.map_speed import Speed
from sgl_frspec.maps import TokenMap, coverage_curve
from sgl_frspec.maps.choosing import AcceptModel, Prediction, cycle_time, fastest, predict


@dataclass(frozen=True)
class Choice:
    """A range of sizes, served and predicted.

    Attributes:
        sizes: served, ascending; ``frspec choose`` was told times and accept lengths of the first
            and the last, and how much of the text each covers.
        served: figures by size.
        predicted: by size.
    """

    sizes: tuple[int, ...]
    served: dict[int, Speed]
    predicted: dict[int, Prediction]

    @property
    def best_served(self) -> int:
        """The size with most tokens per second."""
        return max(self.sizes, key=lambda size: self.served[size].tokens_per_second)

    @property
    def best_predicted(self) -> int:
        """The size that ``frspec choose`` names."""
        return fastest(list(self.predicted.values())).size

    @property
    def steps_apart(self) -> int:
        """Between the two, on the grid of the served sizes."""
        return abs(self.sizes.index(self.best_served) - self.sizes.index(self.best_predicted))

    def record(self) -> dict[str, object]:
        """For a results file."""
        return {
            "predicted": {size: asdict(p) for size, p in self.predicted.items()},
            "best_predicted": self.best_predicted,
            "best_served": self.best_served,
            "steps_apart": self.steps_apart,
        }


def choose(
    token_map: TokenMap,
    vocab: int,
    steps: int,
    served: Mapping[int, Speed],
    text: Sequence[int],
) -> Choice:
    """Predict the sizes between the smallest and the largest that were served.

    Args:
        token_map: the ranked map of the servers.
        vocab: size of the vocabulary.
        steps: draft steps of a round.
        served: figures of one request at a time, by size; at least two sizes.
        text: what the servers generated: the traffic, whose coverage is known at every size.

    Raises:
        ValueError: fewer than two sizes, or times that fall as the vocabulary grows.
    """
    sizes = tuple(sorted(served))
    counts = np.bincount(np.asarray(text, dtype=np.int64), minlength=vocab)
    curve = coverage_curve(token_map, counts)

    def covered(size: int) -> float:
        return 1.0 if size >= vocab else float(curve[min(size, len(curve)) - 1])

    ends = (sizes[0], sizes[-1])
    time = cycle_time({size: served[size].ms_round for size in ends})
    accept = AcceptModel({size: served[size].accept_length for size in ends}, steps, covered)
    predictions = predict(sizes, time, accept, covered)
    return Choice(sizes, dict(served), {p.size: p for p in predictions})


def lines(choice: Choice) -> list[str]:
    """A table of both, and how far apart the best sizes are."""
    rows = [
        f"{'ids':>8}  {'covered':>7}  {'accept':>14}  {'ms/round':>15}  {'tokens/s':>16}",
        f"{'':8}  {'':7}  {'served  chosen':>14}  {'served  chosen':>15}  {'served  chosen':>16}",
    ]
    for size in choice.sizes:
        s, p = choice.served[size], choice.predicted[size]
        marks = "".join(
            (" best served" if size == choice.best_served else "",
             " best predicted" if size == choice.best_predicted else "")
        )  # fmt: skip
        rows.append(
            f"{size:8,}  {p.coverage or 0:7.2%}  {s.accept_length:6.3f}  {p.accept:6.3f}"
            f"  {s.ms_round:7.3f}  {p.cycle_ms:6.3f}  {s.tokens_per_second:7.1f}"
            f"  {p.tokens_per_s:7.1f}{marks}"
        )
    verdict = f"frspec choose names {choice.best_predicted:,}, served best {choice.best_served:,}"
    return [*rows, f"{verdict}: {choice.steps_apart} steps of the grid apart"]
