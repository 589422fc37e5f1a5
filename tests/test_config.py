"""Configs: the values that they refuse, and configs read from files and the environment."""

import dataclasses
import math
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch

from ep_moe.config import (
    ActivationConfig,
    ActivationKind,
    EngineConfig,
    GroupConfig,
    Layout,
    MoEConfig,
    RoutingConfig,
    RoutingMethod,
    TransportConfig,
    from_mapping,
    read_toml,
)
from ep_moe.environment import LaunchEnv, PluginConfig
from ep_moe.fields import Field, check_fields, described

MOE = {"hidden": 48, "intermediate": 32, "num_experts": 6}
TRANSPORT = {"hidden": 48, "max_tokens_per_rank": 8}


def routing(**changes: Any) -> RoutingConfig:
    return RoutingConfig(**{"method": 1, "num_topk": 2, **changes})


def moe(**changes: Any) -> MoEConfig:
    return MoEConfig(**{**MOE, **changes})


def transport(**changes: Any) -> TransportConfig:
    return TransportConfig(**{**TRANSPORT, **changes})


ON_INPUT = {"apply_router_weight_on_input": True}
GROUPS = {"method": 2, "num_group": 4}
REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "method_10": (routing, {"method": 10}, "method (10) is not one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"),
    "num_sms": (transport, {"num_sms": 2}, "num_sms (2) must be 0 or at least 3"),
    "method_name": (routing, {"method": "best"}, "method ('best') is not one of 0"),
    "topk_0": (routing, {"num_topk": 0}, "num_topk (0) must be at least 1"),
    "group_0": (routing, {"method": 2, "num_group": 0}, "num_group (0) must be at least 1"),
    "topk_group_0": (routing, {"method": 2, "topk_group": 0}, "topk_group (0) must be in [1, num_group (1)]"),
    "topk_group_5": (routing, GROUPS | {"topk_group": 5}, "topk_group (5) must be in [1, num_group (4)]"),
    "group_method": (routing, {"method": 7, "num_group": 4}, "num_group (4) needs routing method 2, got 7"),
    "scale_method": (
        routing,
        {"routed_scaling_factor": 2.5},
        "routed_scaling_factor (2.5) needs routing method 2 or 7, got 1",
    ),
    "scale_nan": (routing, {"routed_scaling_factor": math.nan}, "routed_scaling_factor (nan) must be finite"),
    "norm_method": (routing, {"norm_topk_prob": False}, "norm_topk_prob (False) needs routing method 2 or 6, got 1"),
    "group_best_3": (routing, {"method": 2, "group_best": 3}, "group_best (3) must be 1 or 2"),
    "group_best_method": (routing, {"method": 7, "group_best": 1}, "group_best (1) needs routing method 2, got 7"),
    "scoring": (routing, {"method": 2, "scoring": "tanh"}, "scoring ('tanh') is not one of sigmoid, softmax"),
    "scoring_method": (routing, {"scoring": "softmax"}, "scoring ('softmax') needs routing method 2 or 7, got 1"),
    "activation": (ActivationConfig, {"kind": "tanh"}, "kind ('tanh') is not one of silu, gelu, gelu_tanh"),
    "alpha": (ActivationConfig, {"alpha": 1.7}, "alpha (1.7) does not belong to 'silu'"),
    "beta": (ActivationConfig, {"kind": "gelu", "beta": 1.0}, "beta (1.0) does not belong to 'gelu'"),
    "limit": (ActivationConfig, {"kind": "relu2", "limit": 7.0}, "limit (7.0) does not belong to 'relu2'"),
    "step_beta": (ActivationConfig, {"kind": "swiglu_step", "beta": 1.0}, "beta (1.0) does not belong to"),
    "situ_alpha": (ActivationConfig, {"kind": "situ", "alpha": 0.0}, "alpha (0.0) must be positive"),
    "limit_0": (ActivationConfig, {"kind": "swiglu", "limit": 0.0}, "limit (0.0) must be positive"),
    "hidden": (moe, {"hidden": 40}, "hidden (40) must be a positive multiple of 16"),
    "intermediate": (moe, {"intermediate": 0}, "intermediate (0) must be a positive multiple of 16"),
    "no_experts": (moe, {"num_experts": 0}, "num_experts (0) must be at least 1"),
    "layout": (moe, {"layout": "dense"}, "layout ('dense') is not one of batched, compact, flat"),
    "topk_experts": (moe, {"routing": routing(num_topk=7)}, "num_topk (7) exceeds num_experts (6)"),
    "uneven_groups": (moe, {"routing": routing(**GROUPS)}, "num_experts (6) is not a multiple of num_group (4)"),
    "input_weights": (moe, {"routing": routing(), **ON_INPUT}, "apply_router_weight_on_input needs num_topk 1, got 2"),
    "transport_hidden": (transport, {"hidden": -16}, "hidden (-16) must be a positive multiple of 16"),
    "max_tokens": (transport, {"max_tokens_per_rank": 0}, "max_tokens_per_rank (0) must be at least 1"),
    "dtype": (transport, {"dtype": torch.float64}, "dtype (torch.float64) is not one of float32, bfloat16, float16"),
    "slots": (transport, {"num_slots": 0}, "num_slots (0) must be at least 1"),
    "row_alignment": (transport, {"row_alignment": 0}, "row_alignment (0) must be at least 1"),
    "heartbeat": (GroupConfig, {"heartbeat_secs": 0.0}, "heartbeat_secs (0.0) must be positive"),
    "heartbeat_nan": (GroupConfig, {"heartbeat_secs": math.nan}, "heartbeat_secs (nan) must be finite"),
    "timeout": (GroupConfig, {"timeout_secs": 1.9}, "timeout_secs (1.9) must be at least four heartbeats (2.0)"),
    "nproc": (EngineConfig, {"nproc": 0}, "nproc (0) must be at least 1"),
    "device": (EngineConfig, {"device": "tpu"}, "device ('tpu') is not one of auto, cpu, cuda"),
    "dtype_name": (EngineConfig, {"dtype": "fp8"}, "dtype ('fp8') is not one of auto, float32, bfloat16, float16"),
    "engine_layout": (EngineConfig, {"layout": "dense"}, "layout ('dense') is not one of batched, compact, flat"),
    "engine_tokens": (EngineConfig, {"max_tokens_per_rank": 0}, "max_tokens_per_rank (0) must be at least 1"),
    "model": (EngineConfig, {"model": "no/such/folder"}, "model ('no/such/folder') is not a directory of this machine"),
    "timeout_long": (GroupConfig, {"timeout_secs": 1e300}, "timeout_secs (1e+300) must be at most 1e+09"),
    "timeout_inf": (GroupConfig, {"timeout_secs": math.inf}, "timeout_secs (inf) must be finite"),
}


@pytest.mark.parametrize(("make", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(make: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**changes)


VALID: dict[type, dict[str, Any]] = {
    ActivationConfig: {"kind": "swiglu"},
    RoutingConfig: {"method": 2, "num_topk": 2},
    MoEConfig: MOE,
    TransportConfig: TRANSPORT,
    GroupConfig: {},
    EngineConfig: {},
    LaunchEnv: {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "master_addr": "a"}
    | {"master_port": 1, "store_is_hosted": True},
}
NO_VALUES = (None, "a", 2.5, True, math.nan, math.inf, [1], {}, b"a", torch.ones(1), object())
WHAT_FITS: dict[Any, tuple[Any, ...]] = {  # of NO_VALUES, by a field's type; values out of range are refused as well
    int: (),
    float: (2.5,),
    bool: (True,),
    str: ("a",),
    RoutingConfig | None: (None,),
    float | None: (None, 2.5),
    int | None: (None,),
    torch.dtype | None: (None,),
}


@pytest.mark.parametrize("config_type", VALID, ids=lambda config_type: config_type.__name__)
def test_every_field_refuses_what_is_not_of_its_type(config_type: type) -> None:
    config_type(**VALID[config_type])
    for name, wanted in typing.get_type_hints(config_type).items():
        for value in NO_VALUES:
            if any(value is fitting for fitting in WHAT_FITS.get(wanted, ())):
                continue
            with pytest.raises(ValueError, match=rf"^{name}(\[0\])? \("):
                config_type(**{**VALID[config_type], name: value})


def test_a_scheme_is_known_when_a_config_is_made() -> None:
    for make in (moe, EngineConfig):
        for scheme in ("none", "nvfp4", "fp8_block_64x32"):
            assert make(scheme=scheme).scheme == scheme
        with pytest.raises(ValueError, match=r"^scheme \('fp7'\) is not one of none, fp8_tensor"):
            make(scheme="fp7")
        with pytest.raises(ValueError, match=r"block size \(40\) must be a positive multiple of 16"):
            make(scheme="fp8_block_64x40")


def test_numbers_of_other_libraries_are_numbers() -> None:
    config = moe(hidden=np.int64(64), routing=routing(method=2, routed_scaling_factor=2))
    assert (config.hidden, type(config.hidden)) == (64, int)
    assert config.routing is not None
    assert repr(config.routing.routed_scaling_factor) == "2.0"


def test_long_and_deep_values_are_cut_short_in_errors() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 10**6):
        with pytest.raises(ValueError, match="^hidden ") as caught:
            moe(hidden=value)
        assert len(str(caught.value)) < 300


ACCEPTED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "groups": (routing, {"method": 2, "num_group": 4, "topk_group": 4, "routed_scaling_factor": 2.5}),
    "scale_7": (routing, {"method": 7, "routed_scaling_factor": 0.5}),
    "no_norm_6": (routing, {"method": 6, "norm_topk_prob": False}),
    "no_norm_2": (routing, {"method": 2, "norm_topk_prob": False, "routed_scaling_factor": 2.5}),
    "llama4": (routing, {"method": 3, "num_topk": 1}),
    "gpt_oss": (ActivationConfig, {"kind": "swiglu", "alpha": 1.702, "beta": 1.0, "limit": 7.0}),
    "every_expert": (moe, {"routing": routing(num_topk=6)}),
    "apply_weights_to_input": (moe, {"routing": routing(num_topk=1), "apply_router_weight_on_input": True}),
    "weigh_input_later": (moe, {"apply_router_weight_on_input": True}),
    "least": (transport, {"hidden": 16, "max_tokens_per_rank": 1, "num_slots": 1, "row_alignment": 1}),
    "four_heartbeats": (GroupConfig, {"timeout_secs": 2.0, "heartbeat_secs": 0.5}),
}


@pytest.mark.parametrize(("make", "changes"), ACCEPTED.values(), ids=ACCEPTED)
def test_accepted_as_written(make: Callable[..., Any], changes: dict[str, Any]) -> None:
    config = make(**changes)
    assert {name: getattr(config, name) for name in changes} == changes
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, next(iter(changes)), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limited:
    """A field with each limit that a `Field` can have, and one without."""

    count: Annotated[int, Field(help="Count", at_least=2)] = 2
    size: Annotated[int, Field(multiple_of=16)] = 16
    share: Annotated[float | None, Field(positive=True)] = None
    name: Annotated[str, Field(help="Name", choices=("a", "b"))] = "a"
    names: Annotated[tuple[str, ...], Field(choices=("a", "b"))] = ("a",)
    counts: Annotated[tuple[int, ...], Field(at_least=1)] = (1,)
    any: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 1}, "count (1) must be at least 2"),
        ({"size": 0}, "size (0) must be a positive multiple of 16"),
        ({"size": 24}, "size (24) must be a positive multiple of 16"),
        ({"share": 0}, "share (0.0) must be positive"),
        ({"name": "c"}, "name ('c') is not one of a, b"),
        ({"names": ["a", "c"]}, "names ('c') is not one of a, b"),
        ({"names": []}, "names (()) must have one or more elements"),
        ({"counts": []}, "counts (()) must be one or more numbers of at least 1"),
        ({"counts": [2, 0]}, "counts ((2, 0)) must be one or more numbers of at least 1"),
        ({"counts": [2, "3"]}, "counts[1] ('3') is not an integer"),
    ],
    ids=str,
)
def test_a_field_says_its_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Limited(**changes)
    assert Limited(share=0.5, names=("b", "a"), any=(0,)).names == ("b", "a")


def test_a_field_shows_its_choices() -> None:
    fields = described(Limited)
    assert [fields[name][1].text for name in ("count", "name")] == ["Count.", "Name: a, b."]
    assert (fields["share"][0], fields["any"][1].text) == (float | None, ".")


def test_engine_config_derives_dtype_and_deadlines(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", timeout_secs=7.5)
    assert config.torch_dtype is torch.bfloat16
    assert config.group == GroupConfig(timeout_secs=7.5)


def test_numbers_and_names_become_members() -> None:
    assert routing(method=4).method is RoutingMethod.RENORMALIZE_NAIVE
    assert from_mapping(ActivationConfig, {"kind": "gelu"}, "here").kind is ActivationKind.GELU
    assert moe(layout="flat").layout is Layout.FLAT
    gated = [kind.value for kind in ActivationKind if kind.gated]
    assert gated == ["silu", "gelu", "gelu_tanh", "swiglu", "swiglu_step", "situ"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kinds:
    """One field of each type that a file can set, and one that it cannot."""

    count: int = 0
    share: float = 0.0
    name: str = ""
    whole: bool = False
    layout: Layout = Layout.FLAT
    method: RoutingMethod | None = None
    limit: float | None = None
    names: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)


def test_from_mapping_reads_every_type() -> None:
    plain = {"name": "x", "whole": True, "count": 3}
    written = {"share": 2, "layout": "batched", "method": 4, "limit": 7, "names": ["a"], "shares": [1, 0.5]}
    method = RoutingMethod.RENORMALIZE_NAIVE
    read = {
        "share": 2.0,
        "layout": Layout.BATCHED,
        "method": method,
        "limit": 7.0,
        "names": ("a",),
        "shares": (1.0, 0.5),
    }
    assert repr(from_mapping(Kinds, plain | written, "here")) == repr(Kinds(**plain, **read))  # 2 and 2.0 are equal
    assert from_mapping(Kinds, {"limit": None, "method": None}, "here") == Kinds()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 1.5}, "here: count (1.5) is not an integer"),
        ({"count": True}, "here: count (True) is not an integer"),
        ({"count": "1"}, "here: count ('1') is not an integer"),
        ({"share": "much"}, "here: share ('much') is not a number"),
        ({"share": True}, "here: share (True) is not a number"),
        ({"limit": [1.0]}, "here: limit ([1.0]) is not a number"),
        ({"name": 3}, "here: name (3) is not a text"),
        ({"whole": 1}, "here: whole (1) is not true or false"),
        ({"layout": "dense"}, "here: layout ('dense') is not one of batched, compact, flat"),
        ({"method": True}, "here: method (True) is not a name or number"),
        ({"names": "In the beginning"}, "here: names ('In the beginning') is not a list"),
        ({"names": ["a", 2]}, "here: names[1] (2) is not a text"),
        ({"shares": 64}, "here: shares (64) is not a list"),
        ({"sizes": {"a": 1}}, "here: sizes ({'a': 1}) cannot be set from a file"),
    ],
    ids=lambda value: "_".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_from_mapping_refuses_other_types(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        from_mapping(Kinds, values, "here")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**MOE, "hiden": 1, "epxerts": 2}, "here: unknown key epxerts, hiden; known: hidden, intermediate, num_exp"),
        ({"hidden": 48}, "here: missing key intermediate, num_experts"),
        ({}, "here: missing key hidden, intermediate, num_experts"),
        ({**MOE, "hidden": 40}, "hidden (40) must be a positive multiple of 16"),
    ],
    ids=["unknown", "missing", "empty", "invalid"],
)
def test_from_mapping_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_mapping(MoEConfig, values, "here")


def test_read_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[layer]\nhidden = 48\nintermediate = 32\nnum_experts = 6\nlayout = "batched"\n[other]\nx = 1\n')
    assert read_toml(MoEConfig, path, "layer") == moe(layout=Layout.BATCHED)
    assert read_toml(MoEConfig, str(path), "layer") == moe(layout=Layout.BATCHED)


WRONG_FILES = [
    (b"[layer]\nhidden = 48\nwidth = 3\n", " [layer]: unknown key width; known: hidden"),
    (b"[other]\nhidden = 48\n", ": no table [layer]"),
    (b"layer = 48\n", ": no table [layer]"),
    (b"[layer]\nhidden = = 48\n", ": Invalid value (at line 2"),
    (b"\xff", ": 'utf-8' codec can't decode byte 0xff"),
    (b"a = " + b"[" * 100_000, ": nested too deep"),
    (b"[layer]\nhidden = 40\nintermediate = 32\nnum_experts = 6\n", " [layer]: hidden (40) must be a positive"),
]


def test_read_toml_errors(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    for content, words in WRONG_FILES:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{path}{words}")):
            read_toml(MoEConfig, path, "layer")
    with pytest.raises(FileNotFoundError, match=r"absent\.toml"):
        read_toml(MoEConfig, tmp_path / "absent.toml", "layer")


PLACE = {
    "rank": 5,
    "world_size": 8,
    "local_rank": 1,
    "local_world_size": 4,
    "master_addr": "node0",
    "master_port": 29500,
}
TORCHRUN = {name.upper(): str(value) for name, value in PLACE.items()}
TORCHRUN |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
BARE = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_PORT": "1"}


def test_launch_env_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = LaunchEnv(**PLACE, store_is_hosted=True, restart_count=3)
    assert LaunchEnv.from_environ(TORCHRUN) == expected
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert LaunchEnv.from_environ() == expected


@pytest.mark.parametrize(
    ("more", "local_rank", "local_world_size"),
    [({}, 5, 8), ({"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, 1, 4), ({"LOCAL_RANK": "3"}, 3, 8)],
    ids=["one_node", "local_size", "local_rank"],
)
def test_launch_env_defaults(more: dict[str, str], local_rank: int, local_world_size: int) -> None:
    env = LaunchEnv.from_environ(BARE | more)
    assert env is not None
    assert (env.local_rank, env.local_world_size, env.master_addr) == (local_rank, local_world_size, "127.0.0.1")
    assert (env.store_is_hosted, env.restart_count) == (False, 0)


def test_launch_env_without_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LaunchEnv.from_environ({"MASTER_PORT": "1", "SLURM_STEP_NUM_TASKS": "1"}) is None
    monkeypatch.delenv("RANK", raising=False)
    assert LaunchEnv.from_environ() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "RANK (8) is not in [0, WORLD_SIZE (8))"),
        ({"RANK": "-1"}, "RANK (-1) is not in [0, WORLD_SIZE (8))"),
        ({"RANK": None}, "environment variable RANK is not set, although WORLD_SIZE is"),
        ({"RANK": None, "WORLD_SIZE": None}, "environment variable RANK is not set, although LOCAL_RANK is"),
        (
            {"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None, "SLURM_STEP_NUM_TASKS": "4"},
            "environment variable RANK is not set, although srun started 4 tasks: use launch/slurm.sbatch",
        ),
        ({"MASTER_ADDR": None}, "environment variable MASTER_ADDR is not set, although LOCAL_WORLD_SIZE (4) is below"),
        ({"RANK": ""}, "environment variable RANK ('') is not a number"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "RANK (0) is not in [0, WORLD_SIZE (0))"),
        ({"WORLD_SIZE": None}, "environment variable WORLD_SIZE (None) is not a number, although RANK is set"),
        ({"MASTER_PORT": None}, "environment variable MASTER_PORT (None) is not a number"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT (65536) is not in [0, 65535]"),
        ({"MASTER_PORT": "port"}, "environment variable MASTER_PORT ('port') is not a number"),
        ({"LOCAL_RANK": "one"}, "environment variable LOCAL_RANK ('one') is not a number"),
        ({"LOCAL_WORLD_SIZE": "4.0"}, "environment variable LOCAL_WORLD_SIZE ('4.0') is not a number"),
        ({"TORCHELASTIC_RESTART_COUNT": "-1"}, "TORCHELASTIC_RESTART_COUNT (-1) must not be negative"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "environment variable TORCHELASTIC_RESTART_COUNT ('x') is not a number"),
    ],
    ids=lambda value: "_".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_launch_env_errors(changes: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        LaunchEnv.from_environ(environ)


def test_plugin_options_of_the_environment() -> None:
    assert PluginConfig.from_environ({}) == PluginConfig()
    given = {"EP_MOE_VLLM": "1", "EP_MOE_STRICT": "1", "EP_MOE_LAYOUT": "flat", "EP_MOE_TIMEOUT_SECS": "2.5"}
    expected = PluginConfig(vllm=True, strict=True, layout=Layout.FLAT, timeout_secs=2.5)
    assert PluginConfig.from_environ({"EP_MOE_SGLANG": "1"}) == PluginConfig(sglang=True)
    assert PluginConfig.from_environ(given) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [("EP_MOE_VLLM", "yes"), ("EP_MOE_STRICT", "2"), ("EP_MOE_LAYOUT", "flash"), ("EP_MOE_TIMEOUT_SECS", "soon")],
)
def test_a_bad_plugin_option_is_named(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{text}"):
        PluginConfig.from_environ({name: text})
