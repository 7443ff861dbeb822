"""Linear layers: stacked parts, padding, and the row tile that speculation's exactness rests on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from eyas.layers.linear import ANY_ROWS, Linear, RowTile, pad_rows, row_tile

CPU = torch.device("cpu")
SHAPES = [(576, 960), (1536, 576), (1152, 960), (576, 576), (576, 3072), (576, 49152)]
"""(in, out) of SmolLM2 and its drafter; of the last, 4096 output rows are tried."""
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64, 65, 128)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_a_row_has_the_same_bits_among_any_rows(
    in_features: int, out_features: int, dtype: torch.dtype, threads: int
) -> None:
    """Fault: verify arithmetic that depends on the number of rows (v#54506).

    With rows padded to the tile, a row alone equals the row among 1..128, at any place.
    """
    generator = torch.Generator().manual_seed(0)
    tile = row_tile(CPU, dtype)
    weight = torch.randn(min(out_features, 4096), in_features, generator=generator).to(dtype)
    x = torch.randn(131, in_features, generator=generator).to(dtype)

    def padded(rows: torch.Tensor) -> torch.Tensor:
        return F.linear(pad_rows(rows, tile), weight)[: rows.shape[0]]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        single = torch.cat([padded(x[i : i + 1].clone()) for i in range(131)])
        for count in COUNTS:
            for start in (0, 3):
                rows = padded(x[start : start + count].clone())
                assert torch.equal(rows, single[start : start + count]), (count, start)
    finally:
        torch.set_num_threads(before)


def test_pad_rows() -> None:
    """Fault: padding that copies or drops rows."""
    x = torch.ones(3, 2)
    assert pad_rows(x, ANY_ROWS) is x
    assert pad_rows(x, RowTile(3, 3)) is x
    assert pad_rows(x, RowTile(2, 1)) is x
    assert pad_rows(x[:1], RowTile(2, 1)).tolist() == [[1, 1], [0, 0]]
    assert pad_rows(x, RowTile(4, 4)).tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
    assert pad_rows(torch.arange(5), RowTile(4, 4)).tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


@pytest.mark.parametrize("bias", [False, True])
def test_stacked_parts_are_the_parts(bias: bool) -> None:
    """Fault: fused weights in the wrong order. Rows of each named part give its own product."""
    layer = Linear({"q": 4, "k": 2, "v": 2}, 3, bias)
    torch.nn.init.normal_(layer.weight)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    places = layer.places()
    kinds = ("weight", "bias") if bias else ("weight",)
    assert set(places) == {f"{part}.{kind}" for part in "qkv" for kind in kinds}
    for name, start, end in (("q", 0, 4), ("k", 4, 6), ("v", 6, 8)):
        assert places[f"{name}.weight"].into.data_ptr() == layer.weight[start:end].data_ptr()
        assert places[f"{name}.weight"].shape == (end - start, 3)
    x = torch.randn(5, 3)
    y = layer(x)
    for part, (start, end) in {"q": (0, 4), "k": (4, 6), "v": (6, 8)}.items():
        own_bias = None if layer.bias is None else layer.bias[start:end]
        expected = F.linear(x, layer.weight[start:end], own_bias)
        assert torch.allclose(y[:, start:end], expected, atol=1e-6), part
