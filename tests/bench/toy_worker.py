"""``bench.worker`` with toy operations, some of which take the process down."""

import os
import sys
import time

from bench import ops, runner, timing, worker
from bench.op import Case, OpSpec
from tests.bench.toy import provider, toy_op

CASES = [Case(rows=rows, H=16, dtype="fp32") for rows in (1, 2, 3)]


def _abort(x):
    if x.shape[0] == 2:
        os.abort()
    return x * 2


def _hang(x):
    time.sleep(600)


def _lose_context(x):
    raise RuntimeError("illegal address")


def _raise_lost(device, error):
    raise runner.ContextLostError(str(error))


def _raise_broken_capture(device, error):
    raise timing.CaptureBrokenError(str(error))


def _synchronise(x):
    """No graph can capture that the host reads a value."""
    return x * (x.sum().item() * 0 + 2) if x.shape[0] == 1 else x * 2


def _noisy(x):
    sys.stdout.write("libraries print\n")
    return x * 2


TOYS: dict[str, OpSpec] = {
    "right": toy_op(CASES, ours=provider(_noisy)),
    "aborts": toy_op(CASES, ours=provider(_abort), other=provider(lambda x: x * 2)),
    "hangs": toy_op(CASES[:1], ours=provider(_hang)),
    "loses": toy_op(CASES[:2], ours=provider(_lose_context)),
    "breaks_capture": toy_op(CASES[:2], ours=provider(_lose_context)),
    "synchronises": toy_op(CASES[:2], ours=provider(_synchronise), other=provider(lambda x: x * 2)),
}

if __name__ == "__main__":
    if sys.argv[1] == "broken":
        sys.exit(1)
    if sys.argv[1] == "loses":
        runner._raise_if_lost = _raise_lost  # what a GPU would say
    if sys.argv[1] == "breaks_capture":
        runner._raise_if_lost = _raise_broken_capture
    ops.load = lambda wanted=(): ([TOYS[sys.argv[1]]], [])
    sys.exit(worker.main())
