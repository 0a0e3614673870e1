"""Start one real engine, answer all prompts, print one JSON line: ``python run_engine.py JOB``."""

import json
import sys
from pathlib import Path

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
    engine.shutdown()
    print(MARK + json.dumps({"answers": answers, "streams": streamed}))  # noqa: T201


if __name__ == "__main__":
    main()
