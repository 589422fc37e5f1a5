"""Imported first by the server that forks ranks: neither it nor the ranks look for garbage in what it imports.

Collections are a fifth of the time of these imports.
"""

import gc
import os

gc.disable()
os.register_at_fork(before=gc.freeze, after_in_child=gc.enable)
