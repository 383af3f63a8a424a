"""Benchmarks that reproduce every number of the README, run from the repository's root.

`python -m bench` runs all of `bench.kernel`, `bench.model`, `bench.gate`, `bench.host` and
`bench.compile_time`, which write `bench/results/<run>-<gpu>.json`; `python -m bench.report` renders
those into the README.
"""
