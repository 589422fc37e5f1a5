"""Destinations, headers and the rows that are sent: kernel against torch, bit for bit."""

from typing import Any

import pytest
import torch
from helpers.sampling import thinned

from ep_moe.config import Layout
from ep_moe.layout import TokenRows, reference
from ep_moe.layout import triton as layout_launchers
from ep_moe.quant import Quantized, get_scheme
from ep_moe.routing import Routing
from ep_moe.testing import assert_same_bits, poisoned_memory
from ep_moe.transport.collective import launchers, messages, send_plan
from ep_moe.transport.headers import HEADER_WORDS
from ep_moe.transport.payload import RowFormat
from interpreted.common import DEVICE, generator, random_payload

FINGERPRINT = 2**32 - 3
LAYER = (2**31 - 5, -7)  # as `LayerTag.words`
OWNERS = {  # how many experts each rank owns
    "one_rank": [7],
    "three_ranks": [3, 3, 2],
    "an_empty_rank": [4, 0, 9, 4, 4],
    "seventeen_ranks": [1] * 17,
}


def make_ids(tokens: int, topk: int, num_physical: int, dtype: torch.dtype, routing: str) -> torch.Tensor:
    """Ids with repeats; "holes" has -1, "bad" has ids that no rank owns, "one" all to the last expert."""
    ids = torch.randint(-1 if routing == "holes" else 0, num_physical, (tokens, topk + 1), generator=generator(routing))
    if routing == "bad" and tokens:
        ids[0, 0], ids[-1, -2] = num_physical, -2
    if routing == "one":
        ids[:] = num_physical - 1
    return ids.to(dtype)[:, :topk]


@pytest.mark.parametrize(
    ("owners", "tokens", "topk", "routing", "dtype", "summed_at_a_time"),
    thinned(
        OWNERS,
        [(0, 3), (1, 1), (300, 5), (7, 33)],
        [
            ("holes", torch.int32, None),
            ("holes", torch.int64, 16),
            ("bad", torch.int64, 16),
            ("one", torch.int32, None),
        ],
    ),
    ids=str,
)
def test_plan(
    owners: str,
    tokens: int,
    topk: int,
    routing: str,
    dtype: torch.dtype,
    summed_at_a_time: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if summed_at_a_time:
        monkeypatch.setattr(launchers, "_SUMMED_COUNTS", summed_at_a_time)
        monkeypatch.setattr(launchers, "_PLACES", 256)
    owner = torch.repeat_interleave(torch.arange(len(OWNERS[owners])), torch.tensor(OWNERS[owners])).int()
    ids = make_ids(tokens, topk, len(owner), dtype, routing)
    with poisoned_memory():
        headers = [torch.empty(len(OWNERS[owners]), HEADER_WORDS, dtype=torch.int64) for _ in range(2)]
        expected = send_plan.plan_send(ids, owner, fingerprint=FINGERPRINT, layer=LAYER, header=headers[0])
        on_device = headers[1].to(DEVICE)
        actual = launchers.plan_send(
            ids.to(DEVICE), owner.to(DEVICE), fingerprint=FINGERPRINT, layer=LAYER, header=on_device
        )
    assert_same_bits(on_device, headers[0], "header")
    assert_same_bits(actual.token_to_row().cpu(), expected.token_to_row(), "token_to_row")
    assert headers[0][:, [4, 7, 8]].tolist() == [[FINGERPRINT, *LAYER]] * len(OWNERS[owners])
    pairs = [{int(e) for e in row if 0 <= e < len(owner)} for row in ids]
    for rank in range(len(OWNERS[owners])):
        mine = [sum(int(owner[expert]) == rank for expert in experts) for experts in pairs]
        assert headers[0][rank, [0, 5]].tolist() == [sum(count > 0 for count in mine), sum(mine)]


@pytest.mark.parametrize(
    ("scheme_name", "dtype", "ids_dtype"),
    [
        ("none", torch.float32, torch.int32),
        ("none", torch.bfloat16, torch.int64),
        ("none", torch.float16, torch.int32),
        *((name, torch.bfloat16, torch.int64) for name in ("fp8_token", "fp8_block", "mxfp8", "nvfp4", "int8_token")),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("tokens", "topk", "hidden", "owners"),
    [(0, 2, 16, "three_ranks"), (1, 1, 16, "one_rank"), (20, 3, 144, "an_empty_rank"), (3, 9, 2880, "three_ranks")],
)
def test_rows(
    tokens: int, topk: int, hidden: int, owners: str, scheme_name: str, dtype: torch.dtype, ids_dtype: torch.dtype
) -> None:
    scheme, random = get_scheme(scheme_name), generator(f"{tokens} {hidden}")
    owner = torch.repeat_interleave(torch.arange(len(OWNERS[owners])), torch.tensor(OWNERS[owners])).int()
    ids = make_ids(tokens, topk, len(owner), ids_dtype, "holes")
    routing = Routing(topk_ids=ids, topk_weights=torch.rand(tokens, topk, generator=random))
    x = random_payload((tokens, scheme.payload.row_values(hidden)), scheme.payload.dtype or dtype, random)
    sent = x
    if scheme.payload.quantized:
        scale = random_payload((scheme.payload.num_groups(hidden), tokens), scheme.payload.scale_dtype, random).t()
        sent = Quantized(values=x, scale=scale, scheme=scheme)
    header = torch.empty(len(OWNERS[owners]), HEADER_WORDS, dtype=torch.int64)
    planned = send_plan.plan_send(ids, owner, fingerprint=1, layer=LAYER, header=header)
    row_format, num_rows = RowFormat.of(scheme, dtype, hidden, topk), int(header[:, 0].sum())
    expected = torch.empty(num_rows, row_format.row_bytes, dtype=torch.uint8)
    expected_rows = send_plan.write_rows(row_format, sent, routing, planned, expected)
    if isinstance(sent, Quantized):
        placed = Quantized(values=x.to(DEVICE), scale=sent.scale.to(DEVICE), scheme=scheme)
    else:
        placed = x.to(DEVICE)
    with poisoned_memory():
        actual = torch.empty(num_rows, row_format.row_bytes, dtype=torch.uint8, device=DEVICE)
        rows = launchers.write_rows(
            placed,
            Routing(topk_ids=ids.to(DEVICE), topk_weights=routing.topk_weights.to(DEVICE)),
            launchers.plan_send(ids.to(DEVICE), owner.to(DEVICE), fingerprint=1, layer=LAYER, header=header.to(DEVICE)),
            buffer=actual,
        )
    assert_same_bits(rows, expected_rows, "token_to_row")
    assert row_format.row_bytes % 64 == 0
    found, wanted = row_format.read(actual), row_format.read(expected)
    assert_same_bits(found[0], wanted[0], "values")
    assert_same_bits(found[2].topk_ids, wanted[2].topk_ids, "ids")
    assert_same_bits(found[2].topk_weights, wanted[2].topk_weights, "weights")
    if scheme.payload.quantized:
        assert_same_bits(found[1], wanted[1], "scale")
    token, rank = torch.nonzero(expected_rows >= 0, as_tuple=True)
    row = expected_rows[token, rank].long()
    assert sorted(row.tolist()) == list(range(num_rows))
    assert_same_bits(found[0].cpu().view(torch.uint8)[row], x.view(torch.uint8)[token], "values of the tokens")
    assert_same_bits(found[2].topk_ids.cpu()[row], ids[token].int(), "ids of the tokens")


@pytest.mark.parametrize("fault", ["", "ids", "num_tokens", "layer", "fingerprint"])
@pytest.mark.parametrize(
    ("hidden", "topk", "most", "counts"), [(16, 3, 40, (40, 0, 7)), (144, 1, 5, (2,)), (16, 9, 20, (1, 20))]
)
def test_messages(
    hidden: int, topk: int, most: int, counts: tuple[int, ...], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of all ranks, of which the last is at fault, as rank 0 reads them, twice: the first headers are kept."""
    num_ranks, num_physical, random = len(counts), 11, generator(f"{hidden} {fault}")
    row_format = RowFormat.of(get_scheme("none"), torch.float32, hidden, topk)
    owner = torch.arange(num_physical, dtype=torch.int32) % num_ranks
    head, num_rows = messages.head_rows(row_format), [min(count + 1, most) for count in counts]
    with poisoned_memory():
        everyone = torch.empty(num_ranks, head + most, row_format.row_bytes, dtype=torch.uint8)
        launched = torch.empty(num_ranks, head + most, row_format.row_bytes, dtype=torch.uint8, device=DEVICE)
    for source, (count, rows) in enumerate(zip(counts, num_rows, strict=True)):
        at_fault = source == num_ranks - 1
        ids = make_ids(rows, topk, num_physical, torch.int64, "holes")
        if fault == "ids" and at_fault:
            ids[0, 0], ids[-1, -1] = num_physical, -3  # the last row is a token only if there are `most`
        options = {
            "fingerprint": FINGERPRINT + (fault == "fingerprint" and at_fault),
            "layer": (LAYER[0], LAYER[1] + (fault == "layer" and at_fault)),
            "num_physical": num_physical,
        }
        live = torch.tensor([-1 if fault == "num_tokens" and at_fault else count], dtype=torch.int32)
        x, weights = torch.rand(rows, hidden, generator=random), torch.rand(rows, topk, generator=random)
        routing = Routing(topk_ids=ids, topk_weights=weights)
        messages.write_message(row_format, x, routing, everyone[source], num_tokens=live, **options)
        launchers.write_message(
            x.to(DEVICE),
            Routing(topk_ids=ids.to(DEVICE), topk_weights=weights.to(DEVICE)),
            launched[source],
            num_tokens=live.to(DEVICE),
            head=head,
            **options,
        )
        mine, wanted = launched[source].cpu(), everyone[source]
        assert_same_bits(messages.header_of(mine), messages.header_of(wanted), "header")
        found, expected = (row_format.read(message[head:]) for message in (mine, wanted))
        assert_same_bits(found[0], expected[0], "values")
        assert_same_bits(found[2].topk_ids, expected[2].topk_ids, "ids")
        assert_same_bits(found[2].topk_weights, expected[2].topk_weights, "weights")
    own = 1, 10  # the experts of this rank
    kept, found_kept = (messages.new_kept(num_ranks, torch.device(device)) for device in ("cpu", DEVICE))
    for in_one_launch in (True, False):
        nans = torch.zeros(hidden, dtype=torch.bfloat16), torch.zeros(hidden, dtype=torch.bfloat16, device=DEVICE)
        with poisoned_memory():
            columns = torch.empty(num_rows[0], num_ranks + 1, dtype=torch.int32)
            found_columns = torch.empty(num_rows[0], num_ranks + 1, dtype=torch.int32, device=DEVICE)
        call: dict[str, Any] = {"rank": 0, "head": head, "own": own}
        wanted_ids, wanted_weights, nothing = messages.read_messages(
            everyone, row_format, columns=columns, owner=owner, kept=kept, nan_row=nans[0], **call
        )
        assert nothing is None
        call |= {"columns": found_columns, "owner": owner.to(DEVICE), "kept": found_kept, "nan_row": nans[1]}
        if not in_one_launch:
            monkeypatch.setattr(layout_launchers, "_MOST_BLOCKS", 0)
        with poisoned_memory():
            ids, weights, place = launchers.read_messages(launched, row_format, **call)
            assert (place is not None) == in_one_launch
            rows_of_all = row_format.read(launched.view(-1, row_format.row_bytes))
            packed = [
                pack(
                    TokenRows(x=x, scale=None, local_topk_ids=i, topk_weights=w),
                    Layout.COMPACT,
                    scheme=get_scheme("none"),
                    dtype=torch.float32,
                    num_local_experts=own[1] - own[0],
                    capacity=num_ranks * (head + most),
                    **more,
                )
                for pack, x, i, w, more in (
                    (layout_launchers.pack, rows_of_all[0], ids, weights, {"place": place}),
                    (reference.pack, rows_of_all[0].cpu(), wanted_ids, wanted_weights, {"max_rows": None}),
                )
            ]
        for name, mine, wanted in (
            ("ids", ids, wanted_ids),
            ("weights", weights, wanted_weights),
            ("columns", found_columns, columns),
            ("rows", *(one.token_to_row for one in packed)),
            ("counts", *(one.batch.expert_num_tokens for one in packed)),
        ):
            assert_same_bits(mine.cpu(), wanted, name)
        bad = fault in ("ids", "num_tokens") or (fault != "" and num_ranks > 1)
        assert bool(columns[:, -1].ge(0).all()) == bad
        assert bool((wanted_ids >= 0).any()) == (not bad)
        assert [bool(row.isnan().all()) for row in nans] == [bool(row.isnan().any()) for row in nans] == [bad, bad]
        assert_same_bits(found_kept.cpu()[:-1], kept[:-1], "kept headers")
        assert bool(found_kept[-1, 0]) == bool(kept[-1, 0]) == bad
        for messages_of_all in (everyone, launched):
            messages.header_of(messages_of_all[0])[0, 5] += 1  # which only a kept header shows
