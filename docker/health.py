"""Asks the server of this container how it is: exit code 0 if it answers 200, else 1 with the reason.

EP_MOE_PORT is the server's port, 8000 by default.
"""

import json
import os
import sys
import urllib.error
import urllib.request

url = f"http://127.0.0.1:{os.environ.get('EP_MOE_PORT', '8000')}/health"
try:
    with urllib.request.urlopen(url, timeout=4) as answer:
        print(json.dumps(json.load(answer)))
except urllib.error.HTTPError as error:
    sys.exit(f"{url}: {error.code} {error.read(500).decode(errors='replace')}")
except (OSError, ValueError) as error:
    sys.exit(f"{url}: {error}")
