"""`pytest -m engines`: the plug-ins in real releases of serving engines, on a CPU, without their compiled parts.

    pytest -m engines [-k vllm-0.33.0 | -k signatures] [-s]

-s shows the line of each case, with its largest error. The last test compares the calls of `ep_moe.functional` with the
releases whose calls they are. Environment variables:
- EP_MOE_ENGINE_CASES: the cases to run, separated by spaces, or `all`; by default all of the newest release of each
  engine, and `releases.SOME` of the others.
- EP_MOE_ENGINE_CACHE: a folder for wheels and dependencies, by default ~/.cache/ep_moe_engines.
- EP_MOE_REQUIRE_ENGINES=1: an engine that cannot be had is a failure; else it is skipped, as "engine NOT tested".
- EP_MOE_ENGINE_DEVICE=cuda: vLLM's models on one GPU, which its ranks share; its platform and the twins stay a CPU's.
- EP_MOE_ENGINE_TIMEOUT_SECS: for the cases of a release, 300.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from releases import (
    COMPARED,
    DEVICE,
    ENGINES,
    ENVIRON,
    HERE,
    TIMEOUT_SECS,
    Unavailable,
    cache_folder,
    prepare,
    run,
    unpacked,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(2 * TIMEOUT_SECS + 600)]


@contextlib.contextmanager
def needed(name: str) -> Iterator[None]:
    """Skips a test whose release cannot be had, or fails if all are required."""
    try:
        yield
    except Unavailable as error:
        end = pytest.fail if os.environ.get("EP_MOE_REQUIRE_ENGINES") == "1" else pytest.skip
        end(f"engine NOT tested: {name}, {error}")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints and entry points."""
    return prepare(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module", autouse=True)
def downloads(request: pytest.FixtureRequest) -> Iterator[list[Future[Path]]]:
    """Releases that are only compared, downloaded while engines run."""
    compared = any(item.name.startswith("test_signatures") for item in request.session.items)
    with ThreadPoolExecutor(1) as pool:
        yield [pool.submit(unpacked, *release, cache_folder()) for release in COMPARED[:2] if compared]


@pytest.mark.parametrize(("name", "version"), ENGINES, ids=["-".join(release) for release in ENGINES])
def test_a_release(name: str, version: str, work: Path) -> None:
    """The cases of a release on 1 and 2 ranks at the same time."""
    if DEVICE == "cuda" and name == "sglang":
        pytest.skip("on a GPU it calls compiled kernels of its own")
    with needed(f"{name} {version}"):
        failed = run(name, version, work)
    assert not failed, "\n".join(failed)


def test_signatures(downloads: list[Future[Path]]) -> None:
    """The signatures of `ep_moe.functional` are those of other libraries' calls."""
    with needed("signatures"):
        for download in downloads:
            download.result()
        for release in COMPARED:
            unpacked(*release, cache_folder())
    subprocess.run([sys.executable, str(HERE / "signatures.py"), str(cache_folder())], env=ENVIRON, check=True)
