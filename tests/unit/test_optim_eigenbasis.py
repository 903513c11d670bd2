"""SOAP with singular matrices, and with gradients that are not finite."""

import json
from math import isfinite
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from petra.cli.main import main
from petra.optim import SOAP
from petra.optim.eigenbasis import eigenbasis, improve_basis


def singular(kind, size, scale=1.0, seed=0, batch=3):
    """A batch of positive semidefinite matrices, whose last one is regular."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, size, 8, generator=generator)
    if kind == "zero rows":
        x[:, torch.rand(size, generator=generator) < 0.6] = 0
    elif kind == "rank one":
        x = x[:, :, :1]
    elif kind == "zero":
        x.zero_()
    x = scale * (x @ x.mT)
    x[-1] = torch.diag(torch.arange(1.0, size + 1))
    return x


def assert_orthogonal(basis):
    eye = torch.eye(basis.shape[-1], dtype=torch.float64).expand(basis.shape)
    torch.testing.assert_close(basis.double().mT @ basis.double(), eye, rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["zero rows", "rank one", "zero"]),
    st.sampled_from([2, 9, 72, 144]),
    st.sampled_from([1.0, 1e-12, 1e-30, 1e-38, 1e12]),
    st.integers(0, 1000),
)
def test_bases_of_singular_matrices_are_orthogonal(kind, size, scale, seed):
    matrices = singular(kind, size, scale, seed)
    basis = eigenbasis(matrices)
    assert_orthogonal(basis)
    largest = torch.linalg.eigvalsh(matrices.double())[:, -1]
    found = (basis[..., 0].double() * (matrices.double() @ basis.double())[..., 0]).sum(-1)
    torch.testing.assert_close(found, largest, rtol=1e-4, atol=0 if scale == 1 else 1e-40)
    for _ in range(3):
        basis, order = improve_basis(matrices, basis)
        assert_orthogonal(basis)
        assert order.sort().values.equal(torch.arange(size).expand_as(order))


def test_a_matrix_that_fails_does_not_change_the_others():
    """Neither one that does not converge nor one with NaN."""
    matrices = singular("zero rows", 144)
    matrices[1, 2, 3] = torch.nan
    basis = eigenbasis(matrices)
    for i in (0, 2):
        assert basis[i].equal(eigenbasis(matrices[i : i + 1])[0])
    better, order = improve_basis(matrices, basis)
    for found in (basis, better):
        assert found[1].isnan().all()
        assert_orthogonal(found[::2])
    assert order.sort().values.equal(torch.arange(144).expand_as(order))


@pytest.mark.parametrize("failures", [1, 2, 3])
@pytest.mark.parametrize("silent", [True, False])
def test_failed_decompositions_are_repeated(failures, silent, monkeypatch):
    """With a shift, then in float64; after that the basis is the axes."""
    matrices = torch.stack([torch.diag(torch.tensor([0.0, 3.0, 1.0, 2.0])), torch.diag(torch.arange(1.0, 5.0))])
    eigh = torch.linalg.eigh

    def failing(x):
        first = x[:, 0, 0]  # zero, or the shift, in the matrix that fails
        bad = (first < 0.01) & ((first > 0).int() + (x.dtype == torch.float64) < failures)
        if bad.any() and not silent:
            raise torch.linalg.LinAlgError("did not converge")
        vectors = eigh(x).eigenvectors
        vectors[bad] = torch.nan
        return SimpleNamespace(eigenvectors=vectors)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    axes = torch.eye(4)
    assert eigenbasis(matrices).abs().equal(torch.stack([axes[[1, 3, 2, 0]].mT, axes.flip(-1)]))


@pytest.mark.parametrize("failures", [1, 2])
def test_failed_qr_decompositions_are_repeated(failures, monkeypatch):
    """In float64 with a shift; after that the basis stays as it was, apart from its order."""
    matrices, qr, calls = singular("zero rows", 12), torch.linalg.qr, []
    basis = torch.eye(12).expand(3, 12, 12)
    wanted, _ = improve_basis(matrices, basis)

    def failing(x):
        calls.append(x.dtype)
        found = qr(x).Q.clone()
        if len(calls) <= failures:
            found[0] = torch.nan
        return SimpleNamespace(Q=found)

    monkeypatch.setattr(torch.linalg, "qr", failing)
    found, order = improve_basis(matrices, basis)
    assert calls == [torch.float32, torch.float64]
    assert found[1:].equal(wanted[1:])
    assert_orthogonal(found)
    if failures == 2:
        assert found[0].equal(basis[0][:, order[0]])


def small_convolution():
    """A 3×3 kernel on images of one pixel, of which only its centre sees anything but padding."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_that_sees_only_padding_is_trained(dtype):
    net = small_convolution().to(dtype)
    optimizer = SOAP(net.parameters(), 0.01, precondition_frequency=2)
    x, y = torch.randn(16, 4, 1, 1, dtype=dtype), torch.randn(16, 8, dtype=dtype)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    for p in net.parameters():
        assert p.isfinite().all()
        if p.ndim > 1:
            assert_orthogonal(optimizer.state[p]["right_basis"].unsqueeze(0))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("late", [0, 2])
def test_gradients_that_are_not_finite_give_weights_that_are_not(bad, late):
    """So that the loss shows it. The square of 1e30 is infinite too."""
    weight, other = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    optimizer = SOAP([weight, other], 0.01, precondition_frequency=1)
    for step in range(late + 3):
        weight.grad, other.grad = torch.randn(3, 4), torch.randn(3, 4)
        if step == late:
            weight.grad[1, 2] = bad
        optimizer.step()
    assert weight.isnan().any()
    assert other.isfinite().all()


@pytest.mark.slow
def test_a_small_revnet_is_trained(tmp_path):
    """One whose last stages see images of one pixel."""
    network = ["--model", "revnet18", "--width", "8", "--data", "digits", "--optimizer", "soap"]
    run = ["--device", "cpu", "--threads", "1", "--epochs", "1", "--warmup-epochs", "0", "--batch-size", "128"]
    assert main(["train", *network, *run, "--quiet", "--out", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert isfinite(summary["test_loss"])
