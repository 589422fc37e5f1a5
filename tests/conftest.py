"""What holds for all tests."""

import signal

# a shell starts what it runs in the background deaf to Ctrl-C, and so would be all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
