"""Start one real engine, answer all requests, print one JSON line: ``python run_engine.py JOB``."""

import json
import sys
from pathlib import Path
from typing import Any

import sglang  # noqa: TID251 (this file is the engine under test)

MARK = "ENGINE-RESULT "


def main() -> None:
    """Run the job file given on the command line."""
    job = json.loads(Path(sys.argv[1]).read_text())
    engine = sglang.Engine(**job["engine"])
    # One record for all requests, or for each batch a record or one a request.
    samplings = job.get("samplings") or [job["sampling"]] * len(job["batches"])
    results = [
        engine.generate(input_ids=prompts, sampling_params=sampling)
        for prompts, sampling in zip(job["batches"], samplings, strict=True)
    ]
    answers = [
        [{"ids": a["output_ids"], "cycles": a["meta_info"].get("spec_verify_ct")} for a in batch]
        for batch in results
    ]
    streamed = [
        [list(chunk["output_ids"]) for chunk in engine.generate(**request, stream=True)]
        for request in job.get("streams", [])
    ]
    whole = {name: engine.generate(**request) for name, request in job.get("requests", {}).items()}
    if "abort" in job:
        whole |= engine.loop.run_until_complete(_abort(engine, **job["abort"]))
        # An idle engine looks for lost slots of its cache, and ends if it finds one.
        whole["again"] = engine.generate(**job["abort"]["request"])
    found = {"answers": answers, "streams": streamed, "whole": whole}
    if job["engine"].get("enable_metrics"):
        found["metrics"] = _metrics()
    engine.shutdown()
    print(MARK + json.dumps(found))  # noqa: T201


def _metrics() -> str:
    """What the server's ``/metrics`` would say."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return generate_latest(registry).decode()


async def _abort(
    engine: Any, request: dict[str, Any], chunks: int, beside: dict[str, Any]
) -> dict[str, Any]:
    """Abort ``request`` after so many chunks of its stream, while ``beside`` is served."""
    neighbour = engine.loop.create_task(engine.async_generate(**beside))
    received: list[dict[str, Any]] = []
    async for chunk in await engine.async_generate(**request, rid="aborted", stream=True):
        received.append(chunk)
        if len(received) == chunks:
            engine.tokenizer_manager.abort_request("aborted")
    return {"aborted": received[-1], "beside": await neighbour}


if __name__ == "__main__":
    main()
