"""`ep-moe tune`: measures the tiles of the experts' kernels on the present GPU and writes tables that launchers read.

`problem` has the experts and tokens that are timed and the oracle that judges them, `candidates` the tiles to try,
`search` the order in which they are tried, `compiling` the processes that compile them beforehand, `journal` what has
been measured, so that an interrupted run goes on.
"""
