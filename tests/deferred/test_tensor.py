"""Tensors whose values come later: whatever code does while a model is built gives what it gives without them."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.deferred import Deferred, building, is_deferred, is_unwritten, reading_later, realize, realize_all
from lightning_3d.deferred.records import dumps, loads
from lightning_3d.errors import ConfigurationError
from lightning_3d.start_up import warn_of_zeros, without_values
from tests.deferred.twice import both


def value(tensor: Tensor) -> Tensor:
    return tensor.value() if isinstance(tensor, Deferred) else tensor.detach()


def equal(got: nn.Module, want: nn.Module) -> int:
    """Compare all parameters and buffers; returns how many came later."""
    for mine, theirs in (
        (dict(got.named_parameters()), dict(want.named_parameters())),
        (dict(got.named_buffers()), dict(want.named_buffers())),
    ):
        assert list(mine) == list(theirs)
        for name, tensor in theirs.items():
            other = mine[name]
            assert (other.dtype, other.shape, other.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
            assert other.requires_grad == tensor.requires_grad, name
            assert isinstance(other, nn.Parameter) == isinstance(tensor, nn.Parameter), name
            assert torch.equal(value(other), tensor), name
    return sum(map(is_deferred, got.parameters()))


class Net(nn.Module):
    """Initialisations that people write."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16, padding_idx=3)
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)
        self.orthogonal, self.tied = nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.tied.weight = self.embedding.weight
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
        self.lstm, self.conv = nn.LSTM(16, 16), nn.Conv1d(16, 16, 3)
        self.apply(self._init)
        nn.init.trunc_normal_(self.a.weight, std=0.1)
        nn.init.sparse_(self.b.weight, 0.3)
        with torch.no_grad():
            self.b.weight.copy_(self.a.weight.t() * 2)
            self.a.weight[3:5].mul_(3)
            self.a.weight[:, 1], self.a.weight[0] = 7.0, torch.arange(16.0)
            self.conv.weight.data = torch.randn(16, 16, 3) / math.sqrt(48)
            first, second = self.lstm.weight_hh_l0.chunk(2)
            second.copy_(first)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)))
        self.scale = nn.Parameter(torch.ones(16) * torch.rand(()).item())
        self.norm = self.a.weight.norm().item()
        self.given = nn.Parameter(torch.empty(8, 8).uniform_(generator=torch.Generator().manual_seed(4)))
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.forked = nn.Parameter(torch.randn(8, 8))
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 20)]
        self.copied = copy.deepcopy(self.a)
        self.mixed = nn.Parameter(torch.eye(8) + torch.rand(8, 8).softmax(0), requires_grad=False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.transposed = nn.Parameter(torch.randn(8, 4).t())
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(8, 8), 0.5))
        self.dirac = nn.Parameter(nn.init.dirac_(torch.empty(4, 4, 3)))
        self.from_numpy = nn.Parameter(torch.from_numpy(torch.rand(6, 6).numpy() * 2))
        self.low = nn.Linear(8, 8, dtype=torch.bfloat16)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.02)


def test_usual_initialisations() -> None:
    got, want = both(Net)
    assert equal(got, want) > 30
    assert (got.norm, got.rates) == (want.norm, want.rates)
    assert got.tied.weight is got.embedding.weight


def test_values_stay_what_they_are_once_they_are_there() -> None:
    got, want = both(Net)
    seen: list[Any] = []
    objects = {name: id(p) for name, p in got.named_parameters()}
    got.b.weight.register_hook(lambda g: seen.append(g.shape))
    got.b.weight.note = "kept"
    optimizer = torch.optim.SGD(got.parameters(), lr=0.1)
    realize_all(got)
    assert objects == {name: id(p) for name, p in got.named_parameters()}
    assert {type(p) for p in got.parameters()} == {nn.Parameter}
    assert got.b.weight.note == "kept"
    assert equal(got, want) == 0
    got.b(got.a(torch.ones(2, 16))).sum().backward()
    optimizer.step()
    assert seen == [(16, 64)]
    assert not torch.equal(got.b.weight, want.b.weight)
    assert not any(value(p).isnan().any() for p in got.parameters())


def test_changes_after_the_model_was_built_count() -> None:
    got, want = both(Net)
    for net in (got, want):
        net.double()
        net.load_state_dict({k: v.double() + 1 for k, v in want.state_dict().items()})
        net.a.weight.data.mul_(2)
        net.b.weight.data = net.b.weight.data[:, :32].repeat(1, 2)
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(net.encoder.parameters()) * 3, net.encoder.parameters()
        )
    equal(got, want)


def test_copies_and_pickles() -> None:
    got, want = both(Net)
    equal(copy.deepcopy(got), want)
    del got.normed, want.normed  # torch does not pickle these
    file = io.BytesIO()
    torch.save(got, file)
    file.seek(0)
    assert equal(torch.load(file, weights_only=False), want) == 0


def test_values_that_are_read_outside_of_torch() -> None:
    with building(torch.device("cpu")):
        x = torch.full((4, 8), 3.0)
        y = x.clone()
    assert is_deferred(x)
    assert x.numpy().sum() == 96
    assert x.tolist()[0][0] == 3.0
    assert bool((x == y).all())
    assert "values come" in repr(x)
    assert x.data_ptr() == x.untyped_storage().data_ptr() != y.data_ptr() != 0


def test_a_write_that_cannot_wait_is_seen_by_all_views_and_by_none_that_came_before() -> None:
    with building(torch.device("cpu")):
        x = torch.zeros(8, 8)
        before, rows = x + 1, x[2:4]
        torch._foreach_add_([x, torch.ones(3)], 5.0)  # of several tensors at once
        rows.mul_(2)
        x.t_()
    assert torch.equal(value(before), torch.ones(8, 8))
    want = torch.full((8, 8), 5.0)
    want[2:4] = 10
    assert torch.equal(value(rows), want[2:4])
    assert torch.equal(value(x), want.t())


def test_an_operand_that_changes_afterwards_is_an_error() -> None:
    source = torch.ones(8, 8)
    with building(torch.device("cpu")):
        x = torch.empty(8, 8)
        x.copy_(source)
    source.zero_()
    with pytest.raises(ConfigurationError, match="copy a clone of it"):
        realize(x)


def test_long_chains_end() -> None:
    with building(torch.device("cpu")):
        x = torch.ones(4, 4)
        for _ in range(500):
            x = x * 1.01
    assert float(value(x)[0, 0]) == pytest.approx(1.01**500, rel=1e-3)


def test_what_is_overwritten_is_not_computed() -> None:
    """And what was drawn for it is drawn once."""
    with building(torch.device("cpu")):
        x = torch.randn(8, 8)
        x.mul_(float("inf")).uniform_()
        x.t().fill_(2.0)
        x.add_(1)
    window = x.window
    assert window.cell.is_overwritten(since=2)
    assert not window.cell.is_overwritten(since=3)
    assert torch.equal(value(x), torch.full((8, 8), 3.0))


def test_other_devices_and_layouts_are_left_alone() -> None:
    with building(torch.device("cpu")):
        meta = torch.empty(8, 8, device="meta")
        with torch.device("meta"):
            linear = nn.Linear(8, 8)
        sparse = torch.zeros(8, 8, layout=torch.sparse_coo)
    assert (type(meta), type(linear.weight), type(sparse)) == (Tensor, nn.Parameter, Tensor)


def test_records_travel_to_other_ranks() -> None:
    got, want = both(Net)
    windows = {n: p.window for n, p in got.named_parameters() if isinstance(p, Deferred)}
    other = Net()
    for name, window in loads(dumps(windows)).items():
        assert torch.equal(window.of(window.cell.make()), want.get_parameter(name).detach()), name
    assert not torch.equal(other.a.weight, want.a.weight)
    again = {n: p.window for n, p in both(Net)[0].named_parameters() if isinstance(p, Deferred)}
    assert dumps(windows, sampled=True) == dumps(again, sampled=True)
    torch.manual_seed(1)
    with building(torch.device("cpu")):
        third = {n: p.window for n, p in Net().named_parameters() if isinstance(p, Deferred)}
    assert dumps(windows, sampled=True) != dumps(third, sampled=True)


def test_files_are_read_when_the_part_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    from lightning_3d.deferred import files

    want = {"w": torch.randn(8, 8), "v": torch.randn(16, 4), "b": torch.randn(3)}
    safetensors.save_file(want, tmp_path / "w.safetensors")
    read: list[str] = []
    original = files.read_tensor
    monkeypatch.setattr(files, "read_tensor", lambda path, name: read.append(name) or original(path, name))
    with reading_later():
        got = safetensors.load_file(tmp_path / "w.safetensors")
    assert {n: is_deferred(x) for n, x in got.items()} == {"w": True, "v": True, "b": False}
    part = got["w"][2:4].double().clone()
    assert read == []
    assert torch.equal(value(part), want["w"][2:4].double())
    assert read == ["w"]
    realize(got["v"])
    got["v"].mul_(2)  # the file stays what it is
    assert torch.equal(safetensors.load_file(tmp_path / "w.safetensors")["v"], want["v"])
    assert not is_deferred(safetensors.load_file(tmp_path / "w.safetensors")["v"])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "mixtral", "t5", "deepseek"])
def test_hugging_face_models(kind: str, tmp_path: Path) -> None:
    """From a configuration, in bfloat16, and from a folder of weights."""
    transformers = pytest.importorskip("transformers")
    small: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    }  # fmt: skip
    configs = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=32),
        "llama": lambda: transformers.LlamaConfig(**small, num_key_value_heads=2),
        "bert": lambda: transformers.BertConfig(**small),
        "mixtral": lambda: transformers.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=4),
        "t5": lambda: transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64),
        "deepseek": lambda: transformers.DeepseekV3Config(
            **small, moe_intermediate_size=16, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
            num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=8, first_k_dense_replace=1,
        ),
    }  # fmt: skip
    config, auto = configs[kind](), transformers.AutoModel
    for options in ({}, {"dtype": torch.bfloat16}):
        got, want = both(lambda options=options: auto.from_config(config, **options))
        assert equal(got, want) > 5
    torch.manual_seed(2)
    auto.from_config(config).save_pretrained(tmp_path, max_shard_size="30KB")
    with reading_later():
        got, want = both(lambda: auto.from_pretrained(tmp_path))
    with building(torch.device("cpu")), reading_later():
        got = auto.from_pretrained(tmp_path)
    assert equal(got, want) > 5


def test_memory_that_nobody_wrote_to_is_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left in memory is not; here torch leaves NaN in it."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        with building(torch.device("cpu")):
            empty, partly = nn.Parameter(torch.empty(8, 8)), nn.Parameter(torch.empty(8, 8).new_empty(8, 8))
            partly.data[3] = 2.0
            kept = [is_unwritten(x) for x in (empty, partly, empty.double(), nn.Linear(8, 8).weight)]
        assert kept == [True, False, True, False]
        module = nn.ParameterDict({"empty": empty, "partly": partly})
        with pytest.warns(UserWarning, match=r"1 parameters were made without values .* zeros: empty\. Pass ckpt_path"):
            warn_of_zeros(without_values(module))
        realize(empty)
        warn_of_zeros(without_values(module))  # it has values now
        realize(partly)
    finally:
        torch.use_deterministic_algorithms(False)
    assert empty.count_nonzero() == 0
    assert partly.sum() == 16.0
