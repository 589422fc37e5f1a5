"""The shipped model with its experts in Triton's kernels, against transformers' own."""

from ep_moe.app.rebalancing import RebalanceConfig
from ep_moe.app.run import RunConfig
from ep_moe.app.run_rank import run_rank_main
from ep_moe.config import EngineConfig
from ep_moe.group import EPGroup
from interpreted.common import DEVICE


def test_the_kernels_make_the_same_tokens() -> None:
    config = RunConfig(prompts=("In the beginning",), new_tokens=(3,), teacher_tokens=2)
    with EPGroup.single(DEVICE) as group:
        engine = EngineConfig(nproc=1, device=DEVICE.type, dtype="float32", experts="triton")
        report = run_rank_main(group, engine, config, RebalanceConfig())
    assert (report["tokens_equal"], report["new_tokens"]) == (True, 3)
    assert 0 < report["max_logit_diff"] < 1e-4  # kernels add in another order
