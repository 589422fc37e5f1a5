"""Tests of what the one-sided transport does when ranks are lost or refuse: in the interpreter, or on several GPUs."""
