"""One request's rounds on one server of ``bench map-sizes``: kernels, and parts of the cycle."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.breakdown.server_trace import split
from bench.breakdown.text import table
from bench.serving import client, trace
from bench.serving.servers import Say, Server
from bench.serving.trace import RoundProfile
from bench.serving.trace_file import TraceError

ROUNDS = 40
_KERNELS_SHOWN = 14


def profile_round(
    server: Server,
    prompt: Sequence[int],
    folder: Path,
    *,
    drafted: int,
    steps: int,
    ms_round: float | None,
    say: Say,
) -> dict[str, object]:
    """Trace an answer and say what its rounds consist of; what cannot be made out is said too.

    Args:
        server: asked.
        prompt: token ids.
        folder: for this trace alone.
        drafted: ids that its draft proposes.
        steps: draft steps of a round.
        ms_round: length of a round while nothing is traced, where that is known.
        say: reports.

    Returns:
        For a results file: ``profile`` (:class:`bench.serving.trace.RoundProfile`) and ``parts``
        (:class:`bench.breakdown.parts.Split`).
    """
    name = server.variant.name
    found: dict[str, object] = {}
    try:
        events = trace.traced(server, [prompt], folder, ROUNDS)
        profile = trace.analyse(events, ROUNDS)
        say(f"{name}: {_kernels(profile)}")
        found["profile"] = asdict(profile)
        parts = split(
            events,
            implementation=name,
            vocab=drafted,
            steps=steps,
            cycle_us=None if ms_round is None else 1e3 * ms_round,
        )
        say(table(parts))
        found["parts"] = parts.as_json()
    except (TraceError, client.RequestFailedError) as error:
        say(f"{name}: {'no parts' if found else 'no profile'}: {error}")
    return found


def _kernels(profile: RoundProfile) -> str:
    longest = list(profile.by_kernel.items())[:_KERNELS_SHOWN]
    lines = [f"  {us:8.1f} µs {times:6.1f} × {key[:110]}" for key, (times, us) in longest]
    return (
        f"kernels run {profile.busy_ms:.3f} ms of a round, {profile.kernels:.0f} kernels,"
        f" {profile.launches:.0f} launches outside graphs, {profile.graphs:.0f} graphs\n"
    ) + "\n".join(lines)
