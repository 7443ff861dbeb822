"""The parts of `benchmarks/gpu.py`: what is measured on a GPU, and how it is told.

`goals.py` has rows and what they are held against, `record.py` a run's time and its JSON,
`timing.py` and `builds.py` what all parts measure with; `parts.py` lists the parts.
"""
