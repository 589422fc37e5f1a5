"""The few measured figures that `ep-moe doctor` compares a machine with, made from the rows and shipped as a file."""

from collections.abc import Sequence
from typing import Any

from ep_moe.report.records import Record

# what the doctor measures: bench, the words that its rows have, the figure, and its name for readers
MEASURED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "exchange": (
        "transport",
        {
            "tokens": 128,
            "hidden": 7168,
            "num_topk": 8,
            "num_experts": 256,
            "transport": "peer",
            "nodes": 1,
            "layout": "compact",
            "payload": "fp8_block",
            "graph": True,
            "routing": "uniform",
            "num_sms": 0,
        },
        "sum_us",
        "dispatch and combine of 128 tokens per rank (hidden 7168, top 8 of 256)",
    ),
    "GEMMs": (
        "experts",
        {
            "preset": "deepseek-v3",
            "rows_per_expert": 64,
            "num_local_experts": 32,
            "scheme": "fp8_block",
            "counts": "uneven",
            "layout": "compact",
        },
        "call_us",
        "32 experts of DeepSeek-V3 in fp8 blocks, 64 rows each on average",
    ),
}


def expected_figures(records: Sequence[Record]) -> dict[str, Any]:
    """By the name of each measurement: what it is of, and the newest figure of each number and kind of GPUs. Local."""
    found: dict[str, Any] = {}
    for name, (bench, words, figure, of) in MEASURED.items():
        figures: dict[str, Any] = {}
        for record in sorted(records, key=lambda record: record.date):
            own = record.shapes | record.setup
            if record.bench == bench and not record.sweep and all(own.get(key) == words[key] for key in words):
                kind = f"{record.world_size} {record.gpu}"
                figures[kind] = {"us": round(record.figures[figure], 1), "commit": record.commit[:7]}
        found[name] = {"of": of, "figures": dict(sorted(figures.items()))}
    return found
