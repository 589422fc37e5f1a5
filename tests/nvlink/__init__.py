"""Tests of the one-sided transport in Triton's interpreter; `stress` runs on GPUs too."""
