"""Predicts the time and the memory of MoE layers on GPUs that are not at hand, from constants measured on a few.

`traffic` counts what travels, `times` turns counts into microseconds, `planner` compares ways to run a model,
`calibration` finds the constants in measured rows and compares predictions with the other rows.
"""
