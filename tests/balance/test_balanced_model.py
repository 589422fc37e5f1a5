"""The shipped model with copies of experts, other placements in each layer, and the commands that make them."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_moe.app.balance import BalancePlanConfig, RecordConfig, balance_plan, record
from ep_moe.app.check import check_model
from ep_moe.app.placements import model_sizes, placements_for
from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.balance import RecordedLoad, plan_placement, read_placements
from ep_moe.balance.rebalancer import RebalanceStatus
from ep_moe.config import EngineConfig
from ep_moe.engines.transformers import GenerationOptions, from_pretrained, generate
from ep_moe.engines.transformers.decoding import by_transformers
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.placement import Placement

NEAR = 2e-5  # logits of placements, which sum a token's experts in other orders
SIZES = model_sizes(EngineConfig())
RANDOM = torch.randint(0, 1000, (SIZES.num_layers, SIZES.num_experts), generator=torch.Generator().manual_seed(3))


class CountedSteps:
    """In place of a rebalancer: counts its steps."""

    status, steps, destroyed = RebalanceStatus(), 0, False

    def step(self) -> None:
        self.steps += 1

    def finish(self) -> None:
        raise AssertionError("nothing is under way")

    def destroy(self) -> None:
        self.destroyed = True


def steps_of(group: EPGroup) -> list[int]:
    """Steps of this rank in generations by passes and by transformers' loop; one rank has no prompts, others differ."""
    model = from_pretrained(SHIPPED_MODEL, group, dtype=torch.float32, max_tokens_per_rank=16)
    session, counted, found = model.ep_moe, CountedSteps(), []
    session.rebalancer = counted
    options = GenerationOptions(max_new_tokens=4 + 2 * group.rank, end_ids=(32,))
    for run in (generate, by_transformers):
        prompts = torch.randint(1, 255, (2 * group.rank, 9 + 4 * group.rank))
        more = (None, options, lambda count: None) if run is by_transformers else (options,)
        run(model, prompts[: 1 if run is by_transformers else None], *more)
        found.append(counted.steps)
    session.destroy()
    assert counted.destroyed
    return found


def test_all_ranks_step_alike() -> None:
    """A prompt of one rank takes as many steps of the other, also once that one has ended."""
    first, second = launch(steps_of, num_ranks=2, device="cpu")
    assert first == second
    assert first[0] >= 2 + 1  # two prefills, and a pass
    assert first[1] > first[0]


def run_models(group: EPGroup, *placements: Any) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each placement logits and continuations of this rank's prompts, and the load of all ranks."""
    return [run_model(group, placement) for placement in placements]


def run_model(group: EPGroup, placement: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    model = from_pretrained(SHIPPED_MODEL, group, dtype=torch.float32, placement=placement)
    ids = torch.randint(1, 255, (3, 9), generator=torch.Generator().manual_seed(group.rank))
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits
    made = generate(model, ids, GenerationOptions(max_new_tokens=6))
    load = model.ep_moe.total_expert_load()
    model.ep_moe.destroy()
    return logits, made, load


def test_copies_change_no_token_and_no_count() -> None:
    placements = plan_placement(RANDOM, SIZES.num_experts + 5, 2).placements
    assert len(set(placements)) == SIZES.num_layers
    for linear, found in launch(run_models, "linear", placements, num_ranks=2, device="cpu"):
        torch.testing.assert_close(found[0], linear[0], rtol=0, atol=NEAR)
        assert torch.equal(found[1], linear[1])
        assert torch.equal(found[2], linear[2])
        assert found[2].sum(1).tolist() == [4 * 2 * (27 + 27 + 3 * 5)] * SIZES.num_layers


def test_padding_is_not_counted() -> None:
    """Prompts of several lengths in one prefill count as those alone, and continue as those."""
    model = from_pretrained(SHIPPED_MODEL, EPGroup.single("cpu"), dtype=torch.float32)
    session, (prompts, mask) = model.ep_moe, (torch.zeros(3, 20, dtype=torch.int64), torch.zeros(3, 20))
    alone, options = [], GenerationOptions(max_new_tokens=4)
    for row, size in enumerate((3, 20, 11)):
        prompts[row, -size:], mask[row, -size:] = torch.arange(40, 40 + size), 1
        alone.append(generate(model, prompts[row : row + 1, -size:], options)[0])
    counts = session.expert_load
    session.reset_expert_load()
    together = generate(model, prompts, options, attention_mask=mask.long())
    assert torch.equal(together, torch.stack(alone))
    assert torch.equal(session.expert_load, counts)
    assert counts.sum(1).tolist() == [4 * (34 + 3 * 3)] * SIZES.num_layers
    session.destroy()


def test_placements_by_options(tmp_path: Path) -> None:
    file = str(tmp_path / "placement.json")
    RecordedLoad(model=SIZES, load=tuple(map(tuple, RANDOM.tolist()))).save(tmp_path / "load.json")
    made = balance_plan(
        BalancePlanConfig(
            load=tmp_path / "load.json", out=Path(file), ranks=2, redundant_experts=4, plot=tmp_path / "plot.png"
        )
    )
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert made["balancedness"] > 0.99 > made["balancedness_before"]
    assert placements_for(EngineConfig(placement=file), 2) == read_placements(file, SIZES, 2)
    even = placements_for(EngineConfig(redundant_experts=4), 2)
    assert [placement.num_physical for placement in even if isinstance(placement, Placement)] == [20] * 4
    with pytest.raises(ValueError, match=r"is for 2 ranks, there are 3"):
        placements_for(EngineConfig(placement=file), 3)
    with pytest.raises(ValueError, match=r"redundant_experts \(3\) is not the number of copies in .* \(4\)"):
        placements_for(EngineConfig(placement=file, redundant_experts=3), 2)
    with pytest.raises(ValueError, match="needs placement linear or a file, not 'round_robin'"):
        placements_for(EngineConfig(placement="round_robin", redundant_experts=3), 2)
    with pytest.raises(ValueError, match="placement .'absent'. is not one of linear, round_robin"):
        placements_for(EngineConfig(placement="absent"), 2)
    with pytest.raises(ValueError, match=r"is for 2 ranks, there are 6"):
        check_model(EngineConfig(placement=file, ray="auto", nodes=2, nproc=3))  # before ranks start
    again = BalancePlanConfig(
        load=tmp_path / "load.json", ranks=2, redundant_experts=4, previous=Path(file), min_gain=0.05
    )
    assert balance_plan(again)["moves"] == 0


@pytest.fixture
def server() -> Iterator[str]:
    """Answers /load with counts that grow by 5, except for those of the first expert."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            load = [[5 * len(asked) if expert else 7 for expert in range(16)]] * 4
            sizes = {name: getattr(SIZES, name) for name in SIZES.__dataclass_fields__}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"load": load, "sizes": sizes}).encode())

        def log_message(self, *args: Any) -> None:
            del args

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listener.server_port}/v1"
        listener.shutdown()
        thread.join()
    assert asked == ["/load", "/load"]


def test_recording_a_server(server: str, tmp_path: Path) -> None:
    record(EngineConfig(), RecordConfig(out=tmp_path / "load.json", url=server, secs=0.01))
    assert RecordedLoad.read(tmp_path / "load.json", SIZES).load == ((0, *[5] * 15),) * 4


def test_bad_recordings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="either prompts, a file, or the url"):
        RecordConfig(out=tmp_path / "load.json")
    with pytest.raises(RuntimeError, match="http://127.0.0.1:9/load does not answer"):
        record(EngineConfig(), RecordConfig(out=tmp_path / "load.json", url="http://127.0.0.1:9", secs=0.01))
    with pytest.raises(ValueError, match="is a running server, which has its own --nproc"):
        record(EngineConfig(nproc=2), RecordConfig(out=tmp_path / "load.json", url="http://127.0.0.1:9"))
    with pytest.raises(ValueError, match=r"max_new_tokens \(3\) is of prompts"):
        RecordConfig(out=tmp_path / "load.json", url="http://127.0.0.1:9", max_new_tokens=3)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="has no lines"):
        record(EngineConfig(), RecordConfig(out=tmp_path / "load.json", prompts=tmp_path / "empty"))
    with pytest.raises(RuntimeError, match="http://h:abc/load does not answer: nonnumeric port"):
        record(EngineConfig(), RecordConfig(out=tmp_path / "load.json", url="http://h:abc"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="format is None"):
        balance_plan(BalancePlanConfig(load=tmp_path / "other.json"))
    with pytest.raises(ValueError, match="cannot be read"):
        balance_plan(BalancePlanConfig(load=tmp_path / "absent.json"))
