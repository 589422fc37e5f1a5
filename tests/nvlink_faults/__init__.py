"""Tests of the one-sided transport with lost ranks and refused rounds: in the interpreter, or on several GPUs."""
