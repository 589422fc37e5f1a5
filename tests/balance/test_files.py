"""Files of loads and placements: what is written is read, and files of others are refused."""

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ep_moe.balance import (
    ModelSizes,
    RecordedLoad,
    balancedness,
    plan_placement,
    rank_loads,
    read_placements,
    save_placements,
)
from ep_moe.placement import Placement

MODEL = ModelSizes(model_type="qwen3_moe", num_layers=2, num_experts=4, hidden=32, intermediate=16)
LOAD = ((1, 2, 3, 4), (0, 0, 9, 0))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    load, file = RecordedLoad(model=MODEL, load=LOAD), tmp_path / "file.json"
    load.save(file)
    assert RecordedLoad.read(file, MODEL) == load
    placements = plan_placement([[1, 1, 1, 1], [8, 0, 0, 0]], 5, 2).placements
    assert any(placement.idle for placement in placements)
    save_placements(file, placements, MODEL)
    assert read_placements(file, MODEL, num_ranks=2) == placements


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, file = RecordedLoad(model=MODEL, load=LOAD), tmp_path / "file.json"
    load.save(file)
    write_text = Path.write_text

    def half(path: Path, text: str, **options: Any) -> int:
        write_text(path, text[:9], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match=rf"No space left on device: '{file}'"):
        load.save(file)
    assert RecordedLoad.read(file) == load
    assert list(tmp_path.iterdir()) == [file]


CHANGES: dict[str, dict[str, Any]] = {
    "format is 'other', 'ep_moe placements 1' needed": {"format": "other"},
    "layers is None, no list": {"layers": None},
    "starts is 3, no list": {"starts": 3},
    "layers are 1, the model has 2 layers with experts": {"layers": [[0, 1, 2, 3]], "idle": [[]]},
    "idle has 1 entries, layers 2": {"idle": [[]]},
    "idle leaves expert 1 without a position": {"idle": [[1], []]},
    "physical_to_logical holds expert 4 but not expert 3": {"layers": [[0, 1, 2, 4]] * 2},
    "starts (0, 2, 5) must run from 0 to the number of physical experts (4)": {"starts": [0, 2, 5]},
    "layers[0] has 5 experts, the model 4": {"layers": [[0, 1, 2, 3, 4]] * 2, "starts": [0, 2, 5]},
    "is of another model: its hidden is 64, not 32": {
        "model": {"model_type": "qwen3_moe", "num_layers": 2, "num_experts": 4, "hidden": 64, "intermediate": 16}
    },
    "model: unknown key sizes": {"model": {"sizes": 1}},
    "is for 1 ranks, there are 2": {"starts": [0, 4]},
}


@pytest.mark.parametrize("message", CHANGES)
def test_files_of_others_are_refused(message: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    save_placements(file, [Placement.linear(4, 2)] * 2, MODEL)
    file.write_text(json.dumps(json.loads(file.read_text()) | CHANGES[message]))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_placements(file, MODEL, num_ranks=2)


def test_loads_of_other_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="load has 1 layers, the model 2"):
        RecordedLoad(model=MODEL, load=LOAD[:1])
    with pytest.raises(ValueError, match=r"load\[1\] has 4 counts from -1 to 3; 4 from 0 to 2\^63 - 1 needed"):
        RecordedLoad(model=MODEL, load=(LOAD[0], (0, -1, 2, 3)))
    with pytest.raises(ValueError, match=r"load\[0\] has 4 counts from 0 to 9223372036854775808; "):
        RecordedLoad(model=MODEL, load=((0, 1, 2**63, 3), LOAD[1]))
    file = tmp_path / "file.json"
    save_placements(file, [Placement.linear(4, 2)] * 2, MODEL)
    with pytest.raises(ValueError, match="format is 'ep_moe placements 1', 'ep_moe load 1' needed"):
        RecordedLoad.read(file)


def test_loads_of_ranks() -> None:
    placements = [Placement.linear(4, 2), Placement((0, 2, 1, 2, 3), (0, 2, 5))]
    loads = rank_loads(LOAD, placements)
    assert loads == [[3.0, 7.0], [4.5, 4.5]]
    assert balancedness(loads) == pytest.approx((5 + 4.5) / (7 + 4.5))
    assert balancedness([[0.0, 0.0]]) == 1.0
