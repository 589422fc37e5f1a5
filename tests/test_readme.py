"""Examples of README and docs run unchanged and print what is shown; statements and links are true."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import test_rules
import typer
from helpers.processes import EP_MOE, environ

from ep_moe.cli import app
from ep_moe.config import EngineConfig
from ep_moe.serving.protocol import NEUTRAL, UNUSED, ChatRequest, CompletionRequest
from ep_moe.transport import TRANSPORTS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("C*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
# blocks marked `py` are excerpts, which do not run
EXAMPLES = [
    pytest.param(code, shown, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (code, shown) in enumerate(CODE.findall(page.read_text()), start=1)
]

ENGINE = EngineConfig()
DEFAULTS = {
    "nproc": "one",  # for each GPU
    "device": ENGINE.device,
    "dtype": ENGINE.dtype,
    "quant": ENGINE.scheme,
    "transport": ENGINE.transport,
    "experts": ENGINE.experts,
    "placement": ENGINE.placement,
    "redundant-experts": str(ENGINE.redundant_experts),
    "layout": ENGINE.layout.value,
    "max-tokens-per-rank": str(ENGINE.max_tokens_per_rank),
    "timeout-secs": f"{ENGINE.timeout_secs:g}",
}


@pytest.mark.parametrize(("code", "shown"), EXAMPLES)
def test_an_example_prints_what_is_shown(code: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}")
    command = [sys.executable, str(tmp_path / "example.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown != ""


def test_the_readme_has_an_example_of_each_entrance_in_python() -> None:
    assert [len(re.findall(f"import.* {name}", README)) for name in ("from_pretrained", "ExpertParallelMoE")] == [1, 1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_server_of_the_readme_answers(tmp_path: Path) -> None:
    shape = r"^<!-- serve -->\n```bash\n(.*?)^```\n\n```text\n.*?\"text\":\"(.*?)\""
    [(block, text)] = re.findall(shape, README, re.MULTILINE | re.DOTALL)
    _, serve, request = block.split("\n", 2)  # the first line installs it
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = shlex.split(serve.partition("&")[0].replace("8000", port))
    assert command[0] == "ep-moe"
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            [*EP_MOE, *command[1:], "--nproc", "1", "--device", "cpu"], env=environ(), stdout=log, stderr=log
        )
        try:
            done = subprocess.run(
                ["bash", "-c", request.replace("8000", port)], capture_output=True, text=True, timeout=120, check=False
            )
        finally:
            server.terminate()
            server.wait(timeout=60)
    assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()
    assert json.loads(done.stdout)["choices"][0]["text"] == text


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    rows = [re.split(r" *\| *", line) for line in (ROOT / "docs" / "BENCHMARKS.md").read_text().splitlines()]
    figures = re.findall(
        r"^\| .* \| (\d) (H\d00) \| ([\d.,]+) \S+ \| ([\d.,]+) \S+, .* \| \**([\d.]+)(, slower)?", README, re.M
    )
    assert len(figures) == 5
    assert sum(bool(slower) for *_, slower in figures) >= 1
    for gpus, _, ours, theirs, ratio, slower in figures:
        shown = {gpus, ours, theirs, f"{ratio} (slower)" if slower else ratio}
        assert any(shown <= {*row} for row in rows), shown


def test_the_option_table_has_every_default() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    rows = re.findall(r"^\| `--([\w-]+)` \| `?(\w+)`?", page, re.MULTILINE)
    assert dict(rows) == DEFAULTS


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S))
    assert [link for link in links if "://" not in link and not (page.parent / link).is_file()] == []


def test_the_tables_of_the_server_name_all_parameters_and_a_test_for_each_row() -> None:
    page = (ROOT / "docs" / "serving.md").read_text().partition("## Formats of answers")[0]
    rows = re.findall(r"^\| (`.*|any .*) \| ([^|]*) \|$", page, re.MULTILINE)
    named = [re.findall(r"`(\S+\.py)::(test_\w+)`", tests) for _, tests in rows]
    assert [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    sources = {name: (ROOT / "tests" / "serving" / name).read_text() for tests in named for name, _ in tests}
    assert [each for tests in named for each in tests if f"\ndef {each[1]}(" not in sources[each[0]]] == []
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields, *UNUSED, *NEUTRAL}
    assert sorted(fields - {name for row, _ in rows for name in re.findall(r"`(\w+)[`.]", row)}) == []


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
    transports.remove("nvlink")  # an older name of peer
    assert sorted((packages | transports) - words) == []


@pytest.mark.parametrize("command", ["run", "generate", "eval"])
def test_every_command_has_the_options_of_the_table(command: str) -> None:
    group = typer.main.get_command(app)
    options = {option for parameter in group.commands[command].params for option in parameter.opts}
    assert {f"--{name}" for name in DEFAULTS} | {"--model", "--json"} <= options


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "contributing").glob("*.md")), ids=lambda page: page.stem)
def test_files_of_recipes_are_there(page: Path) -> None:
    """Every path of the repository that a recipe names; one beside another path is in the same folder."""
    missing = []
    for line in page.read_text().splitlines():
        folder = ROOT  # of the last file named in this line
        for name in re.findall(r"`([\w./-]+\.(?:py|json|toml|svg|md)|(?:ep_moe|tests|configs|docs)/[\w./-]+)`", line):
            if not re.search(
                "[A-Z]{4}", name.replace("README", "").replace("CONTRIBUTING", "")
            ):  # NAME, to be replaced
                place = next((at for at in (ROOT / name, folder / name) if at.exists()), None)
                missing += [] if place else [name]
                folder = place.parent if place and place.is_file() else folder
    assert missing == []


def test_the_check_of_links_sees(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html#there">b</a><a href="#here">a</a></p>')
    (tmp_path / "b.html").write_text('<a name="there"></a><a href="https://example.org/">elsewhere</a>')
    command = [sys.executable, str(ROOT / ".ci" / "links.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all links lead somewhere\n")
    (tmp_path / "c.html").write_text(
        '<a href="d.html">d</a><a href="a.html#gone">a</a><script src="https://example.org/x.js"></script>'
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "c.html: d.html leads nowhere",
        "c.html: a.html#gone leads nowhere",
        "c.html: https://example.org/x.js is loaded from another host",
    ]
