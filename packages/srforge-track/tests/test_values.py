"""What a run reports becomes plain, without loss and without secrets."""

import json
import math

import numpy as np
import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.tracking.values import REDACTED, flatten_metrics, json_number, plain_config, to_pixels


def test_nested_metrics_become_one_level_of_floats():
    metrics = {"training": {"loss": torch.tensor(0.5), "psnr": {"red": np.float32(2)}}, "rate": 3}
    assert flatten_metrics(metrics) == {"training/loss": 0.5, "training/psnr/red": 2.0, "rate": 3.0}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": torch.ones(2)}, r"`metrics\['loss'\]` must be one number, but is Tensor"),
        ({"a": {"b": "x"}}, r"`metrics\['a/b'\]` must be one number, but is str"),
        ({"a/b": 1, "a": {"b": 2}}, "'a/b' is there twice"),
        ({"epoch": 1}, "'epoch' is the name of the axis"),
    ],
)
def test_metrics_that_cannot_be_kept_are_named(metrics, message):
    with pytest.raises(ConfigurationError, match=message):
        flatten_metrics(metrics)


@pytest.mark.parametrize("value", [0.1, 1e-300, -0.0, math.inf, -math.inf, math.nan])
def test_a_number_survives_strict_json_bit_for_bit(value):
    text = json.dumps(json_number(value), allow_nan=False)
    back = float(json.loads(text))
    assert np.float64(back).tobytes() == np.float64(value).tobytes()


def test_keys_and_passwords_are_replaced_and_the_rest_stays(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    config = {
        "tracking": {"api_key": "abc", "WANDB_API_KEY": "abc", "password": "x", "hf-token": "y", "empty_token": ""},
        "note": "my key is 0123456789abcdef, keep it",
        "model": {"tokenizer": "bpe", "num_tokens": 7, "keys": ["a", "b"], "monkey": "m", "token": 3},
    }
    assert plain_config(config) == {
        "tracking": {
            "api_key": REDACTED,
            "WANDB_API_KEY": REDACTED,
            "password": REDACTED,
            "hf-token": REDACTED,
            "empty_token": "",
        },
        "note": REDACTED,
        "model": {"tokenizer": "bpe", "num_tokens": 7, "keys": ["a", "b"], "monkey": "m", "token": 3},
    }


def test_scalars_of_numpy_and_torch_become_numbers():
    assert plain_config({"a": np.int64(3), "b": torch.tensor(2.5), "c": float("inf"), "d": None, "e": True}) == {
        "a": 3,
        "b": 2.5,
        "c": "inf",
        "d": None,
        "e": True,
    }


def test_float_images_are_clamped_and_rounded_half_to_even():
    values = torch.tensor([-1.0, 0.0, 0.5 / 255, 1.5 / 255, 2.5 / 255, 1.0, 7.0, float("nan")], dtype=torch.float64)
    assert to_pixels(values.reshape(1, 1, 8))[0, :, 0].tolist() == [0, 0, 0, 2, 2, 255, 255, 0]


def test_tensors_and_arrays_give_the_same_picture():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    as_tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    assert np.array_equal(to_pixels(pixels), pixels)
    assert np.array_equal(to_pixels(as_tensor), pixels)
    assert np.array_equal(to_pixels(as_tensor.float() / 255), pixels)
    assert np.array_equal(to_pixels(pixels[..., 0]), np.stack([pixels[..., 0]] * 3, axis=-1))


@pytest.mark.parametrize("image", [np.zeros((4, 5, 3)), torch.zeros(4, 5, 5), np.zeros((0, 5), np.uint8), "x"])
def test_what_is_no_picture_is_refused(image):
    with pytest.raises(ConfigurationError, match="`image` must be a uint8 array"):
        to_pixels(image)
