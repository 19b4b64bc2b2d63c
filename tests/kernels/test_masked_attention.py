"""Attention under unit words: the reference against a plain softmax, the Triton kernels against the reference, forward and
backward, over outputs poisoned with NaN. Compiled where there is a GPU, else interpreted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from paged_caches import DEVICE
from sparroll.attention.masked import reference as masked_reference
from sparroll.attention.masked import unit_bitmap
from sparroll.attention.masked.api import check_offsets, implementation, masked_attention
from sparroll.errors import UserError

pytest.importorskip("triton", reason="triton runs on Linux only")

# The interpreter multiplies the bits of bf16 matrices instead of their values.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
# The last one has more units than a word has bits, and many tiles; interpreted, the time goes with its square.
ODD_TOKENS = [1, 15, 17, 63, 100, 1000 if DEVICE == "cuda" else 530]


@dataclass(frozen=True)
class Case:
    """Sequences with a random choice of units; query, keys, values and the output's gradient as transformers lays them."""

    query: Tensor
    keys: Tensor
    values: Tensor
    grad_out: Tensor
    read_BSHU: Tensor
    unit: int
    scale: float

    @property
    def words(self) -> Tensor:
        return unit_bitmap.pack(self.read_BSHU)

    def run(self, impl: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Output and the three gradients."""
        given = [each.to(dtype).detach().requires_grad_() for each in (self.query, self.keys, self.values)]
        out = masked_attention(*given, self.words, self.unit, self.scale, impl)
        return out.detach(), *torch.autograd.grad(out, given, self.grad_out.to(dtype))


def case(
    tokens: int, group: int = 2, dim: int = 32, unit: int = 16, heads: int = 2, batch: int = 1, share: float = 0.3
) -> Case:
    generator = torch.Generator().manual_seed(tokens + 7 * group + dim)

    def heads_of(count: int) -> Tensor:
        return torch.randn(batch, tokens, count, dim, generator=generator).to(DEVICE).transpose(1, 2)

    units = -(-tokens // unit)
    # Whole stretches of positions leave a unit out, so that there is something to skip.
    coarse = torch.rand(batch, -(-tokens // 32), heads, units, generator=generator) < 2 * share
    read = coarse.repeat_interleave(32, 1)[:, :tokens] & (
        torch.rand(batch, tokens, heads, units, generator=generator) < 0.5
    )
    own = torch.arange(tokens) // unit
    read[:, torch.arange(tokens), :, own] = True
    many = heads * group
    return Case(heads_of(many), heads_of(heads), heads_of(heads), heads_of(many), read.to(DEVICE), unit, dim**-0.5)


def softmax_over_the_visible(given: Case, dtype: torch.dtype, rounded: torch.dtype) -> tuple[Tensor, ...]:
    """Output and gradients through one plain T x T softmax; inputs, weights and results rounded to `rounded`."""

    def rough(tensor: Tensor) -> Tensor:
        return tensor + (tensor.to(rounded).to(dtype) - tensor).detach()

    leaves = [each.to(rounded).to(dtype).detach().requires_grad_() for each in (given.query, given.keys, given.values)]
    tokens, group = given.query.shape[2], given.query.shape[1] // given.keys.shape[1]
    query, keys, values = leaves[0], *(each.repeat_interleave(group, 1) for each in leaves[1:])
    visible = given.read_BSHU.repeat_interleave(given.unit, 3)[..., :tokens].transpose(1, 2).repeat_interleave(group, 1)
    visible = visible & torch.ones(tokens, tokens, dtype=torch.bool, device=visible.device).tril()
    logits = given.scale * query @ keys.transpose(2, 3)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    out = rough(weights) @ values
    gradients = torch.autograd.grad(out, leaves, given.grad_out.to(rounded).to(dtype))
    return tuple(each.to(rounded) for each in (out.detach(), *gradients))


def assert_as_exact_as_its_dtype(given: Case, found: tuple[Tensor, ...]) -> None:
    """Within three times the error that rounding softmax weights and results to the dtype makes by itself."""
    dtype = found[0].dtype
    inputs = (each.to(dtype).double() for each in (given.query, given.keys, given.values, given.grad_out))
    given = replace(given, **dict(zip(("query", "keys", "values", "grad_out"), inputs, strict=True)))
    exact = softmax_over_the_visible(given, torch.float64, torch.float64)
    rough = softmax_over_the_visible(given, torch.float32 if dtype != torch.float32 else torch.float64, dtype)
    for name, ours, theirs, known in zip(("out", "dq", "dk", "dv"), found, rough, exact, strict=True):
        assert not ours.isnan().any(), f"NaN in {name}"
        rounding = 4 * torch.finfo(dtype).eps * float(known.abs().max())
        allowed = max(3 * float((theirs.double() - known).abs().max()), rounding, 2e-5)
        error = float((ours.double() - known).abs().max())
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated and not written shows."""

    def poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: object, **options: object) -> Tensor:
            tensor = allocate(*args, **options)
            wrong = 1 << 20 if tensor.dtype in (torch.int32, torch.int64) else 1
            # Autograd's own leaves are filled too.
            tensor.detach().fill_(torch.nan if tensor.is_floating_point() else wrong)
            return tensor

        return allocated

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))


@pytest.mark.parametrize("tokens", ODD_TOKENS)
@pytest.mark.usefixtures("poisoned")
def test_triton_equals_the_reference_at_odd_lengths(tokens: int) -> None:
    given = case(tokens, batch=2 if tokens < 200 else 1, heads=2 if tokens < 200 else 1)
    found = given.run("triton", torch.float32)
    assert_as_exact_as_its_dtype(given, found)
    for ours, theirs in zip(found, given.run("reference", torch.float32), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.usefixtures("poisoned")
def test_triton_at_every_head_size_and_group(group: int, dim: int) -> None:
    given = case(83, group, dim)
    assert_as_exact_as_its_dtype(given, given.run("triton", DTYPES[(group + dim // 32) % len(DTYPES)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit", [1, 4, 12, 16, 64, 128])
@pytest.mark.usefixtures("poisoned")
def test_triton_at_every_unit(unit: int, dtype: torch.dtype) -> None:
    given = case(150, unit=unit)
    assert_as_exact_as_its_dtype(given, given.run("triton", dtype))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_all_units_equal_dense_causal_attention(impl: str) -> None:
    given = case(75, group=4)
    given = replace(given, read_BSHU=torch.ones_like(given.read_BSHU))
    leaves = [each.detach().requires_grad_() for each in (given.query, given.keys, given.values)]
    dense = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    expected = dense.detach(), *torch.autograd.grad(dense, leaves, given.grad_out)
    for ours, theirs in zip(given.run(impl, torch.float32), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_position_that_reads_nothing_gives_zeros_and_takes_no_gradient(impl: str) -> None:
    given = case(40)
    read = given.read_BSHU.clone()
    read[:, 33] = False
    out, grad_query, grad_keys, grad_values = replace(given, read_BSHU=read).run(impl, torch.float32)
    assert not out[:, :, 33].any() and not grad_query[:, :, 33].any()
    assert all(bool(each.isfinite().all()) for each in (out, grad_query, grad_keys, grad_values))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_units_past_a_position_are_never_read(impl: str) -> None:
    given = case(70, unit=4)
    later = torch.arange(18)[None, :] * 4 > torch.arange(70)[:, None]
    more = replace(given, read_BSHU=given.read_BSHU | later[None, :, None].to(DEVICE))
    for plain, with_more in zip(given.run(impl, torch.float32), more.run(impl, torch.float32), strict=True):
        torch.testing.assert_close(with_more, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_twice_is_the_same_to_the_bit(impl: str) -> None:
    if impl == "reference" and DEVICE == "cuda":
        pytest.skip("torch's fused attention may add up a gradient in any order")
    given = case(100)
    for first, second in zip(given.run(impl, DTYPES[-1]), given.run(impl, DTYPES[-1]), strict=True):
        assert torch.equal(first, second)


def test_a_gradient_without_memory_of_its_own_is_taken() -> None:
    given = case(33)
    found = replace(given, grad_out=torch.ones((), device=DEVICE).expand_as(given.grad_out)).run(
        "triton", torch.float32
    )
    expected = replace(given, grad_out=torch.ones_like(given.grad_out)).run("triton", torch.float32)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("tokens", ODD_TOKENS[:-1])
def test_reference_equals_a_plain_softmax(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_reference, "_LOGITS_AT_ONCE", 1)
    given = case(tokens, batch=2)
    expected = softmax_over_the_visible(given, torch.float64, torch.float64)
    for ours, theirs in zip(given.run("reference", torch.float64), expected, strict=True):
        torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=1e-10, rtol=0)


def test_reference_gradients_equal_finite_differences() -> None:
    given = case(11, dim=4, unit=4)
    leaves = [each[:, :, :, :4].double().detach().requires_grad_() for each in (given.query, given.keys, given.values)]
    assert torch.autograd.gradcheck(lambda *each: masked_attention(*each, given.words, 4, 0.5), leaves)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 100])
def test_words_hold_what_was_packed(tokens: int) -> None:
    read = case(tokens, unit=4, batch=3).read_BSHU
    words = unit_bitmap.pack(read)
    assert torch.equal(unit_bitmap.unpack(words, 0, tokens), read.transpose(1, 2))
    assert torch.equal(unit_bitmap.unpack(words, tokens // 2, tokens), read[:, tokens // 2 :].transpose(1, 2))


def test_auto_is_visible_and_an_unknown_or_impossible_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert implementation("auto", "cpu") == "reference"
    assert implementation("auto", "cuda") == "triton"
    with pytest.raises(UserError, match="needs CUDA tensors, got cpu"):
        implementation("triton", "cpu")
    with pytest.raises(UserError, match="no masked attention implementation 'tritton'"):
        implementation("tritton", "cpu")


def test_sequences_that_the_kernels_cannot_address_are_refused() -> None:
    def query(tokens: int) -> torch.Tensor:
        return torch.empty(1, tokens, 64, 128, device="meta").transpose(1, 2)

    check_offsets(query(2**18 - 1))
    with pytest.raises(UserError, match="a sequence of 262,144 tokens with 64 heads of 128 is too long"):
        check_offsets(query(2**18))


def test_shapes_and_dtypes_that_do_not_fit_are_refused() -> None:
    given = case(40)
    with pytest.raises(UserError, match="words_BHPU must have shape"):
        masked_attention(given.query, given.keys, given.values, given.words[:, :, :1], 16, 1.0)
    with pytest.raises(UserError, match="values_BHSD must be torch.float32 like the query, got torch.float16"):
        masked_attention(given.query, given.keys, given.values.half(), given.words, 16, 1.0)
    with pytest.raises(UserError, match="take bf16, fp16 and fp32, got torch.float64"):
        given.run("triton", torch.float64)


@pytest.mark.parametrize(
    ("group", "capability", "stages"), [(1, (9, 0), 2), (2, (9, 0), 3), (8, (9, 0), 3), (8, (8, 0), 2), (2, (10, 0), 2)]
)
def test_three_stages_only_where_warp_groups_multiply(
    group: int, capability: tuple[int, int], stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparroll.attention.masked.triton_tiles import MaskedTile

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert MaskedTile.default(128, group, 2, torch.device("cuda")).forward_stages == stages
