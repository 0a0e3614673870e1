"""The benchmark harness: ``python -m bench --help``. How to read it: docs/bench.md.

====================  ===============================================================
``op.py``             what an operation declares: cases, inputs, reference, providers
``ops/``              one entry module an operation, same stem as the kernel module
``checks.py``         the correctness rules, shared with the tests
``timing.py``         CUDA-graph replay over inputs that the L2 cache does not hold
``roofline.py``       measured peaks of the device: bytes and operations a second
``runner.py``         one case: check, then time, then rows
``worker.py``         the process that runs cases on a GPU
``supervisor.py``     starts workers, and goes on when one dies
``report.py``         the table on the screen, CSV, JSON and Markdown
``plots.py``          time against V and against rows, with the floor
``commands/``         one module a subcommand
====================  ===============================================================
"""
