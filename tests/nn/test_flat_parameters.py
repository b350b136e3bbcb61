"""One flat vector per layer: contiguous, aligned, shared by its views, cut into few slices."""

import numpy as np
import pytest
from hypothesis import given

from minidist import backend, nn
from minidist.nn.flat_parameters import flat_slices
from tests.strategies import mlps, transformers


@given(model=transformers())
def test_each_layer_has_one_vector_in_the_order_of_its_parameters(model):
    covered = []
    for layer in model.layers:
        flat = layer.flat
        covered += flat.parameters
        joined = np.concatenate([p.data.reshape(-1) for p in flat.parameters])
        np.testing.assert_array_equal(flat.vector, joined)
        assert flat.vector.shape == flat.gradient.shape == (flat.size,)
    assert covered == model.parameters()  # a tied parameter once, in the first layer that has it


@given(drawn=mlps())
def test_views_share_the_memory_of_aligned_contiguous_vectors(drawn):
    model, _ = drawn
    for layer in model.layers:
        for vector in (layer.flat.vector, layer.flat.gradient):
            assert vector.ctypes.data % 64 == 0 and vector.flags.c_contiguous
        layer.flat.vector[:] = np.arange(layer.flat.size)
        layer.flat.gradient[:] = -np.arange(layer.flat.size)
        start = 0
        for p in layer.parameters():
            want = np.arange(start, start + p.size).reshape(p.shape)
            np.testing.assert_array_equal(p.data, want)
            np.testing.assert_array_equal(p.grad_buffer, -want)
            start += p.size


def test_gradients_are_collected_from_wherever_they_are():
    model = nn.MLP([1, 2])
    weight, bias = model.parameters()
    flat = model.layers[0].flat
    flat.gradient[:] = np.nan
    weight.grad = np.array([[3, 4]], "float32")  # a fresh array, as a strategy assigns it
    flat.collect_gradients()
    np.testing.assert_array_equal(flat.gradient, [3, 4, 0, 0])  # none counts as zero
    assert bias.grad is None


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_flattened_there(monkeypatch):
    def never(*_):
        raise AssertionError("the host has no part in this")

    model = nn.MLP([3, 2]).to("gpu")
    monkeypatch.setattr(backend, "to_host", never)
    monkeypatch.setattr(backend, "empty", never)
    model.flatten().astype("float64").freeze("layers.0.bias")
    flat = model.flatten(lambda shape, dtype: np.empty(shape, dtype)).layers[0].flat
    for array in (flat.vector, flat.gradient, flat.empty((2,), "uint8")):
        assert backend.on_gpu(array)


def test_neighbours_are_merged_into_one_slice():
    model = nn.MLP([2, 3, 1])
    (w0, b0), (w1, b1) = [layer.parameters() for layer in model.layers]

    def cuts(*parameters):
        return [(s.home, s.start, s.stop) for s in flat_slices(list(parameters))]

    first, second = [layer.flat for layer in model.layers]
    assert cuts(w0, b0, w1, b1) == [(first, 0, 9), (second, 0, 4)]
    assert cuts(b0, w1) == [(first, 6, 9), (second, 0, 3)]
    assert cuts(b0, w0, b0) == [(first, 6, 9), (first, 0, 6)]  # each covered once
    assert cuts(*model.freeze("layers.0.weight").parameters()) == [
        (model.layers[0].flat, 0, 3),
        (model.layers[1].flat, 0, 4),
    ]
