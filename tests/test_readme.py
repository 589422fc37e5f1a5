"""The README's Python runs as it stands, and its words about the command line are true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ep_moe.config import EngineConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int, tmp_path: Path) -> None:
    checks = "\nassert out.shape[0] == (10 if 'tokens' in dir() else model.dummy_inputs['input_ids'].shape[0])\n"
    script = tmp_path / "example.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{EXAMPLES[number]}{checks}")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("option", ["nproc", "device", "dtype", "transport", "experts", "placement", "layout"])
def test_the_option_table_has_the_default(option: str) -> None:
    row = re.search(rf"^\| `--{option}` \| `?(\w+)`?", README, re.MULTILINE)
    default = getattr(EngineConfig(), option)
    assert row is not None
    assert row[1] == str(getattr(default, "value", default))
