"""The benchmark harness: ``python -m bench --help``. How to read it: docs/benchmarking.md.

====================  ===============================================================
``op.py``             what an operation declares: cases, inputs, reference, providers
``ops/``              one entry module an operation, same stem as the kernel module
``checks.py``         the correctness rules, shared with the tests
``timing.py``         CUDA-graph replay over inputs that the L2 cache does not hold
``roofline.py``       measured peaks of the device: bytes and operations a second
``runner.py``         check, then time, then a row
``report.py``         the table on the screen, CSV and JSON
``plots.py``          time against V and against rows, with the floor
``commands/``         one module a subcommand
====================  ===============================================================
"""
