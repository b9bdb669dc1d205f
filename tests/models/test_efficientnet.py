"""EfficientNet-Lite0 against its reference, and the projection of its classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

from omnistage.errors import MediaError, WeightsError
from omnistage.models.efficientnet import EfficientNetLite0, ImageProjector, SameConv2d
from omnistage.models.protocols import VideoFrames
from omnistage.models.registry import find_part, load_encoder
from omnistage.models.starter_vision import build_projector, fold_weights
from omnistage.types import PortType

DATA = Path(__file__).parent.parent / "data"
RULE = {"min_confidence": 0.3, "min_candidate_mass": 0.7}


def finish(work):
    num_slices = 1
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value, num_slices
        num_slices += 1


def picture(name):
    return np.asarray(Image.open(DATA / name).convert("RGB"))


def pattern():
    """A picture [224, 224, 3] that integer arithmetic gives alike everywhere."""
    rows, columns = np.arange(224)[:, None], np.arange(224)[None]
    planes = [(rows * 3 + columns * 5) % 256, (rows * columns // 7) % 256, (rows + columns * 2) % 256]
    return np.stack(planes, -1).astype(np.uint8)


def write_random(directory):
    torch.manual_seed(0)
    network = EfficientNetLite0(10)
    save_file(network.state_dict(), directory / "model.safetensors")
    projector = {
        "names": torch.randn(10, 6, 8),
        "lengths": torch.tensor([1, 2, 3, 4, 5, 6, 1, 2, 3, 4]),
        "unclear": torch.randn(2, 8),
    }
    save_file(projector, directory / "projector.safetensors")
    (directory / "labels.json").write_text(json.dumps([f"class {index}" for index in range(10)]))
    config = {"model_type": "efficientnet_lite0", "image_size": 224, "crop_ratio": 0.875, "num_classes": 10}
    (directory / "config.json").write_text(json.dumps(config | RULE))
    return network.eval()


@pytest.mark.parametrize(("size", "kernel", "stride"), [(8, 3, 2), (8, 5, 2), (7, 3, 2), (8, 5, 1)])
def test_padding_is_tensorflows(size, kernel, stride):
    """For stride 2 and an even size the extra row and column are right and below."""
    torch.manual_seed(0)
    convolution, x = SameConv2d(2, 3, kernel, stride), torch.randn(1, 2, size, size)
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    padded = torch.zeros(1, 2, size + total, size + total)
    padded[:, :, total // 2 : total // 2 + size, total // 2 : total // 2 + size] = x
    expected = nn.functional.conv2d(padded, convolution.weight, convolution.bias, stride)
    torch.testing.assert_close(convolution(x), expected)
    assert convolution(x).shape[-1] == -(-size // stride)


def test_folded_batch_norms_change_nothing():
    torch.manual_seed(0)
    state, layers = {"_fc.weight": torch.randn(4, 5).T, "_fc.bias": torch.randn(5)}, {}
    for ours, convolution, norm in (
        ("stem", "_conv_stem", "_bn0"),
        ("head", "_conv_head", "_bn1"),
        ("blocks.0.depthwise", "_blocks.0._depthwise_conv", "_blocks.0._bn1"),
        ("blocks.0.project", "_blocks.0._project_conv", "_blocks.0._bn2"),
    ):
        layer = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, eps=1e-3)).eval()
        for tensor in (layer[1].weight, layer[1].bias, layer[1].running_mean, layer[1].running_var):
            nn.init.uniform_(tensor, 0.1, 2.0)
        state[f"{convolution}.weight"] = layer[0].weight.detach()
        state |= {f"{norm}.{name}": tensor for name, tensor in layer[1].state_dict().items()}
        layers[ours] = layer
    folded = fold_weights(state)
    x = torch.randn(1, 3, 6, 6)
    for ours, layer in layers.items():
        result = nn.functional.conv2d(x, folded[f"{ours}.weight"], folded[f"{ours}.bias"])
        torch.testing.assert_close(result, layer(x))
    del state["_bn1.bias"]
    with pytest.raises(WeightsError, match=r"_bn1\.bias"):
        fold_weights(state)


def test_the_projector_holds_the_embeddings_of_the_names_tokens():
    vocabulary = {"?": 0, " big": 1, " cat": 2, " something": 3, " unclear": 4}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    from tokenizers import Regex, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" [a-z]+"), "isolated")
    embeddings = torch.randn(5, 8).bfloat16()
    projector = build_projector(["big cat", "cat (wild)"], tokenizer, embeddings)
    assert projector["lengths"].tolist() == [2, 1]
    assert torch.equal(projector["names"][0, :2], embeddings[[1, 2]].float())
    assert torch.equal(projector["names"][1, 0], embeddings[2].float())
    assert not projector["names"][1, 1:].any()
    assert torch.equal(projector["unclear"], embeddings[[3, 4]].float())


def project(probabilities):
    torch.manual_seed(0)
    tensors = {
        "names": torch.randn(16, 3, 4),
        "lengths": torch.tensor([2, 3] + [1] * 14),
        "unclear": torch.full((2, 4), 7.0),
    }
    labels = list("abccdefghijklmno")
    rest = 16 - len(probabilities)
    probabilities = torch.tensor(probabilities + [(1 - sum(probabilities)) / rest] * rest)
    payload = ImageProjector(tensors, labels, RULE)(probabilities)
    return tensors["names"], payload, payload.tensors["embeddings"].numpy()


def test_slots_are_means_weighted_by_probability_over_the_names_that_reach_them():
    names, payload, rows = project([0.6, 0.3, 0.04, 0.03, 0.02])
    assert payload.info["label"] == "a"
    assert payload.info["is_clear"] is True
    mass = np.array([0.6, 0.3, 0.04, 0.03, 0.02], np.float32)
    first = (names[:5, 0].numpy() * mass[:, None]).sum(0) / mass.sum()
    second = (names[:2, 1].numpy() * mass[:2, None]).sum(0) / mass[:2].sum()
    np.testing.assert_allclose(rows[:2], [first, second], rtol=1e-5)
    # The third slot is reached by "b" alone, which holds 0.3 / 0.99 of the candidates' mass: just used.
    np.testing.assert_allclose(rows[2], names[1, 2].numpy(), rtol=1e-5)
    assert len(project([0.7, 0.2, 0.04, 0.03, 0.02])[2]) == 2


@pytest.mark.parametrize("probabilities", [[0.29, 0.28, 0.2, 0.05, 0.05], [0.4, 0.1, 0.06, 0.06, 0.05]])
def test_a_picture_that_no_class_fits_gets_the_words_for_it(probabilities):
    _, payload, rows = project(probabilities)
    assert payload.info["is_clear"] is False
    assert rows.tolist() == [[7.0] * 4] * 2


def test_classes_of_one_name_count_as_one():
    _, payload, _ = project([0.2, 0.1, 0.25, 0.2, 0.1])
    assert payload.info["label"] == "c"
    assert payload.info["confidence"] == pytest.approx(0.45)
    assert payload.info["is_clear"] is True


def test_rows_do_not_depend_on_the_batch_and_work_comes_in_slices(tmp_path):
    network = write_random(tmp_path)
    encoder = load_encoder(find_part(tmp_path, None))
    assert (encoder.modalities, encoder.output, encoder.sample_rate) == (("image",), PortType.EMBEDDINGS, 0)
    assert encoder.weight_bytes == sum(tensor.nbytes for tensor in network.parameters())
    items = [encoder.preprocess(image, {}) for image in (pattern(), pattern()[::-1], pattern()[:, :100])]
    together, num_slices = finish(encoder.encode(items))
    assert num_slices > 3 * len(items)
    for item, payload in zip(items, together, strict=True):
        (alone,), _ = finish(encoder.encode([item]))
        assert bytes(alone.tensors["embeddings"].data) == bytes(payload.tensors["embeddings"].data)
        with torch.inference_mode():
            probabilities = network(item[None]).softmax(-1)[0]
        assert payload.info["confidence"] == pytest.approx(probabilities.max().item(), abs=1e-5)


def test_preprocess_takes_the_centre_square(tmp_path):
    write_random(tmp_path)
    encoder = load_encoder(find_part(tmp_path, None))
    raw = np.zeros((256, 512, 3), np.uint8)
    raw[16:240, 144:368] = 255  # exactly the 224 x 224 in the middle
    assert encoder.preprocess(raw, {}).unique().tolist() == [1.0]
    assert encoder.preprocess(np.zeros((1, 1, 3), np.uint8), {}).shape == (3, 224, 224)


@pytest.mark.parametrize(
    "raw", [np.zeros((4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8), np.zeros((4, 4, 3), np.float32)]
)
def test_an_array_that_is_no_picture_is_named(tmp_path, raw):
    write_random(tmp_path)
    with pytest.raises(MediaError, match="uint8"):
        load_encoder(find_part(tmp_path, None)).preprocess(raw, {})


def test_a_video_is_refused(tmp_path):
    write_random(tmp_path)
    encoder = load_encoder(find_part(tmp_path, None))
    assert encoder.video_fps == 0.0
    with pytest.raises(MediaError, match="send frames as pictures"):
        encoder.preprocess(VideoFrames(pattern()[None], 2.0), {})


def test_labels_must_fit_the_projector(tmp_path):
    write_random(tmp_path)
    (tmp_path / "labels.json").write_text('["one"]')
    with pytest.raises(WeightsError, match="1 class names"):
        load_encoder(find_part(tmp_path, None))


@pytest.fixture(scope="module")
def vision(starter_dir):
    return load_encoder(find_part(starter_dir, "vision"))


@pytest.mark.starter
def test_logits_equal_the_reference_network(vision):
    pixels = torch.from_numpy((pattern().astype(np.float32) - 127) / 128).permute(2, 0, 1)
    logits, _ = finish(vision._classify(pixels))
    np.testing.assert_allclose(logits.numpy(), np.load(DATA / "efficientnet_lite0_logits.npy"), atol=1e-4)


@pytest.mark.starter
@pytest.mark.parametrize(
    ("name", "labels"),
    [("cat.jpg", {"tabby cat", "a cat having a striped coat", "Egyptian Mau"}), ("coffee.jpg", {"espresso"})],
)
def test_a_clear_picture_speaks_its_class_in_the_thinkers_tokens(vision, starter_dir, name, labels):
    from safetensors import safe_open

    ((payload,), _) = finish(vision.encode([vision.preprocess(picture(name), {})]))
    rows = torch.from_numpy(payload.tensors["embeddings"].numpy().copy())
    assert rows.shape[1] == 576
    assert 1 <= len(rows) <= 6
    assert payload.info["label"] in labels
    assert payload.info["is_clear"] is True
    with safe_open(starter_dir / "thinker" / "model.safetensors", "pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight").float()
    nearest = (nn.functional.normalize(rows) @ nn.functional.normalize(table).T).argmax(-1).tolist()
    tokenizer = Tokenizer.from_file(str(starter_dir / "thinker" / "tokenizer.json"))
    spoken = tokenizer.decode(nearest)
    assert any(part in spoken for part in payload.info["label"].split()), spoken


@pytest.mark.starter
def test_an_unknown_picture_is_called_unclear(vision):
    ((payload,), _) = finish(vision.encode([vision.preprocess(picture("astronaut.jpg"), {})]))
    assert payload.info["is_clear"] is False
    assert payload.tensors["embeddings"].shape == (2, 576)
