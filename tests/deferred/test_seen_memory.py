"""Code that sees, shares or replaces memory while a model is built: it finds what it finds without deferring."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_3d.deferred import Deferred, building, is_deferred, reading_later, realize, realize_all
from lightning_3d.deferred.records import dumps
from lightning_3d.errors import ConfigurationError
from tests.deferred.twice import both


class _Own(nn.Parameter):
    """A class of its own, as quantised weights have."""


def written_by_numpy() -> nn.Module:
    layer = nn.Embedding(8, 8)
    layer.weight.data.numpy()[2] = 5.0
    return layer


def read_by_numpy() -> nn.Module:
    layer = nn.Linear(8, 8)
    assert layer.weight.detach().numpy().sum() != 0
    layer.weight.data.mul_(2)
    return layer


def written_by_dlpack() -> nn.Module:
    layer = nn.Embedding(8, 8)
    torch.from_dlpack(layer.weight.data).fill_(2)
    layer.weight.data[0] = 1
    return layer


def from_one_numpy_buffer() -> nn.Module:
    layers, buffer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), np.empty((8, 8), np.float32)
    for number, layer in enumerate(layers):
        buffer[:] = number
        layer.weight.data.copy_(torch.from_numpy(buffer))
    return layers


def statistics() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.InstanceNorm2d(8, track_running_stats=True))
    net(torch.randn(2, 3, 8, 8))
    return net


def lazy() -> nn.Module:
    net = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.LazyLinear(8))
    net(torch.randn(4, 8))
    return net


def parametrized() -> nn.Module:
    net = nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8)), parametrizations.spectral_norm(nn.Linear(8, 8)))
    return net.append(parametrizations.weight_norm(nn.Linear(8, 8)))


def many_times() -> nn.Module:
    x = torch.randn(8, 8)
    for _ in range(36):  # elementwise: products of matrices may round otherwise in memory that is aligned otherwise
        x = (x * x.tanh() + x) / 2
    layer = nn.Linear(8, 8)
    layer.weight.data = x
    return layer


def own_class() -> nn.Module:
    module = nn.Module()
    module.weight = _Own(torch.randn(8, 8))
    return module


def legacy() -> nn.Module:
    module = nn.Module()
    module.a = nn.Parameter(torch.Tensor(8, 8).normal_())
    module.b = nn.Parameter(torch.Tensor(module.a.data).mul_(2))
    module.c = nn.Parameter(torch.randn(8, 8).share_memory_().apply_(lambda x: x + 1))
    module.d = nn.Parameter(nn.functional.rrelu(torch.randn(8, 8), training=True))
    return module


def replaced() -> nn.Module:
    layer = nn.Linear(2, 2)  # has values
    layer.weight.data = torch.randn(8, 8)
    layer.bias.data = torch.zeros(3)
    return layer


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))  # type: ignore[no-any-return]


def default_type() -> nn.Module:
    module, before = nn.Module(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module.rates = nn.Parameter(torch.arange(64) / 7)
        module.bias = nn.Parameter(torch.where(torch.arange(64) > 3, 0.3, 0.7))
    finally:
        torch.set_default_dtype(before)
    return module


def row_by_row() -> nn.Module:
    layer = nn.Embedding(200, 16)
    for row in layer.weight.data:
        row.div_(row.norm().item())
    return layer


MAKES = [
    written_by_numpy, read_by_numpy, written_by_dlpack, from_one_numpy_buffer, statistics, lazy, parametrized,
    many_times, own_class, legacy, replaced, scripted, default_type, row_by_row,
]  # fmt: skip


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:.*(Lazy|torch.jit).*")
def test_values_are_those_of_a_model_built_at_once(make: Callable[[], nn.Module]) -> None:
    got, want = both(make)
    realize_all(got)
    names = dict(got.state_dict())
    assert list(names) == list(want.state_dict())
    for name, tensor in want.state_dict().items():
        assert not is_deferred(names[name]), name
        assert names[name].dtype == tensor.dtype, name
        assert torch.equal(names[name], tensor), name
    assert [type(p) for p in got.parameters()] == [type(p) for p in want.parameters()]


def test_an_array_that_nobody_wrote_to_goes() -> None:
    with building(torch.device("cpu")):
        x = torch.randn(8, 8)
        array = x.numpy()
        assert x.window.cell.solid is not None
        del array
        assert x.window.cell.solid is None
        array = x.numpy()
        array[0] = 7
        del array
        assert x.window.cell.solid is not None
    assert float(x[0, 3]) == 7


def test_memory_has_an_address() -> None:
    """Tied parameters are found by it."""
    with building(torch.device("cpu")):
        a, b = nn.Linear(8, 8), nn.Linear(8, 8)
        c = copy.copy(a)
    assert len({m.weight.data_ptr() for m in (a, b, c)}) == 2
    assert a.weight.untyped_storage().data_ptr() == a.weight.data_ptr()


def test_a_change_without_a_version_is_an_error() -> None:
    source = torch.ones(8, 8)
    with building(torch.device("cpu")):
        x = torch.empty(8, 8)
        x.copy_(source)
    source.data.zero_()
    with pytest.raises(ConfigurationError, match="copy a clone of it"):
        realize(x)


def test_what_inference_gave_can_be_copied() -> None:
    with torch.inference_mode():
        features = torch.full((8, 8), 2.0)
    with building(torch.device("cpu")):
        x = torch.empty(8, 8)
        x.copy_(features)
    assert isinstance(x, Deferred)
    assert float(x.value().sum()) == 128


def test_files_that_go_or_change(tmp_path: Path) -> None:
    """Saved and loaded while the model is built; asked for a value; deleted; written to."""
    st = pytest.importorskip("safetensors.torch")
    layers: list[Any] = []
    with building(torch.device("cpu")), reading_later():
        layers = [nn.Linear(8, 8) for _ in range(3)]
        want: Tensor = torch.tensor(layers[0].weight.tolist())
        st.save_model(layers[0], tmp_path / "a.safetensors")
        for layer in layers[1:]:
            st.load_model(layer, tmp_path / "a.safetensors")
        mean = layers[1].weight.mean().item()
        (tmp_path / "a.safetensors").unlink()
    assert mean == pytest.approx(float(want.mean()))
    realize_all(layers[1])
    assert torch.equal(layers[1].weight, want)
    st.save_file({"w": want}, tmp_path / "b.safetensors")
    with reading_later():
        loaded = st.load_file(tmp_path / "b.safetensors")["w"]
    st.save_file({"w": want + 1}, tmp_path / "new.safetensors")
    (tmp_path / "new.safetensors").replace(tmp_path / "b.safetensors")
    assert torch.equal(loaded, want)  # the file that was opened
    with reading_later():
        loaded = st.load_file(tmp_path / "b.safetensors")["w"]
    with (tmp_path / "b.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"1234")
    with pytest.raises(ConfigurationError, match="write another file"):
        realize(loaded)


def test_rows_that_differ_between_ranks_are_seen() -> None:
    """Anywhere: vectors of a file, and random ones for words that it does not have."""

    def record(middle: float) -> bytes:
        vectors = np.zeros((5000, 4), np.float32)
        vectors[1000] = middle
        with building(torch.device("cpu")):
            x: Any = torch.empty(5000, 4)
            x.copy_(torch.from_numpy(vectors))
        return dumps({"x": x.window}, sampled=True)

    assert record(1) == record(1)
    assert record(1) != record(2)


def test_contexts_may_lie_in_one_another() -> None:
    before = nn.Parameter.__new__
    with building(torch.device("cpu")):
        with building(torch.device("cpu")):
            inner = nn.Linear(8, 8)
        outer = nn.Linear(8, 8)
        outer.weight.data = torch.ones(8, 8)
    assert is_deferred(inner.weight)
    assert is_deferred(outer.weight)
    realize_all(outer)
    assert torch.equal(outer.weight, torch.ones(8, 8))
    assert nn.Parameter.__new__ is before
    assert "data" not in vars(Tensor)


def test_memory_of_others_is_copied_where_nobody_tells_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_3d.deferred.kept._MAPS", Path("/nowhere"))
    with building(torch.device("cpu")):
        layers = from_one_numpy_buffer()
    realize_all(layers)
    assert [layer.weight[0, 0].item() for layer in layers] == [0.0, 1.0]  # type: ignore[index, union-attr]
