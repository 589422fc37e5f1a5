"""The README's Python runs unchanged, its statements about the command line are true, links in docs lead to files."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import test_rules
import typer

from ep_moe.cli import app
from ep_moe.config import EngineConfig
from ep_moe.transport import TRANSPORTS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
CHECKS = {
    "model.generate(": """
prompt = model.dummy_inputs["input_ids"]
assert out.shape == (prompt.shape[0], prompt.shape[1] + 8), out.shape
assert torch.equal(out[:, : prompt.shape[1]], prompt.to(out.device))
assert out.dtype == torch.int64
assert 0 <= out.min() <= out.max() < model.config.vocab_size
""",
    "ExpertParallelMoE(": """
assert (out.shape, out.dtype) == (tokens.shape, torch.bfloat16)
assert out.isfinite().all()
assert (out.norm(dim=1) > 0).all()
""",
}

ENGINE = EngineConfig()
DEFAULTS = {
    "nproc": "one",  # for each GPU
    "device": ENGINE.device,
    "dtype": ENGINE.dtype,
    "quant": ENGINE.scheme,
    "transport": ENGINE.transport,
    "experts": ENGINE.experts,
    "placement": ENGINE.placement,
    "layout": ENGINE.layout.value,
    "max-tokens-per-rank": str(ENGINE.max_tokens_per_rank),
    "timeout-secs": f"{ENGINE.timeout_secs:g}",
}


@pytest.mark.parametrize("name", CHECKS)
def test_example_runs(name: str, tmp_path: Path) -> None:
    [example] = [code for code in EXAMPLES if name in code]
    script = tmp_path / "example.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{example}\nimport torch\n{CHECKS[name]}")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_every_example_has_its_check() -> None:
    assert len(EXAMPLES) == len(CHECKS)


def test_the_option_table_has_every_default() -> None:
    rows = re.findall(r"^\| `--([\w-]+)` \| `?(\w+)`?", README, re.MULTILINE)
    assert dict(rows) == DEFAULTS


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).is_file()] == []


def test_the_picture_is_drawn_from_itself_alone() -> None:
    picture = (ROOT / "docs" / "token.svg").read_text()
    assert "](docs/token.svg)" in README
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert re.findall(r"https?://[^\"]+|@import|href|url\([^#)]*\)", picture) == ["http://www.w3.org/2000/svg"]


def test_the_picture_of_levels_names_every_package_and_transport() -> None:
    picture = ElementTree.parse(ROOT / "docs" / "levels.svg").getroot()
    words = {word for text in picture.itertext() for word in re.findall(r"\w+", text)}
    packages = {name for level in test_rules.LEVELS for name in level if not name.startswith("__")}
    transports = {name for name in TRANSPORTS if not name.startswith("deepep_")}  # modes of one
    assert sorted((packages | transports) - words) == []


@pytest.mark.parametrize("command", ["run", "generate", "eval"])
def test_every_command_has_the_options_of_the_table(command: str) -> None:
    group = typer.main.get_command(app)
    options = {option for parameter in group.commands[command].params for option in parameter.opts}
    assert {f"--{name}" for name in DEFAULTS} | {"--model", "--json"} <= options
