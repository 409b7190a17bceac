"""Accounting, sampling, clipping, noise and the plan that couples them.

This room knows neither modules nor transformers: it is the part an auditor reads.
"""
