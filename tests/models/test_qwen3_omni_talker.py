"""The talker's prompt, its frames of codes and their sampling equal transformers', alone and in a batch."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerForConditionalGeneration,
)

from omnistage.errors import NotFound, WeightsError
from omnistage.models.loader import read_json
from omnistage.models.qwen3_omni_positions import (
    PositionRules,
    PromptMedia,
    RopeIndex,
    last_assistant_row,
    talker_rope_index,
    user_rows,
)
from omnistage.models.qwen3_omni_talker import NUM_SPEECH_ROWS, Talker, load_talker, talker_config
from omnistage.models.qwen3_residual_codes import GREEDY, CodePicker, CodeSampling
from tests.models.flat_rows import PagedRun
from tests.models.qwen3_reference import (
    MAX_CODES,
    OMNI_CASES,
    RECORDED,
    REPETITION_PENALTY,
    Answer,
    load,
    omni_answer,
)
from tests.models.qwen_checkpoints import ROLES, init_weights, published_tensors, save_shards, write_json
from tests.models.qwen_configs import SPECIAL_TOKENS, omni_config

TOLERANCE = 1e-4
SPEAKER = "Ethan"


@pytest.fixture(scope="module")
def talker(qwen3_omni_dir) -> Talker:
    return load_talker(qwen3_omni_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def config(qwen3_omni_dir) -> dict[str, Any]:
    return read_json(qwen3_omni_dir / "config.json")


def spoken_prompt(
    talker: Talker, config: dict[str, Any], answer: Answer
) -> tuple[Tensor, RopeIndex, list[int]]:
    """Rows and positions of the talker's prompt, and the tokens that are still to be spoken."""
    ids = np.asarray(answer.prompt_ids)
    rows = user_rows(ids, im_start_id=config["im_start_token_id"], user_id=config["user_token_id"])
    user_ids = torch.from_numpy(ids[rows])
    media_ids = [config["thinker_config"][f"{kind}_token_id"] for kind in ("image", "video", "audio")]
    is_media = torch.isin(user_ids, torch.tensor(media_ids))
    heard = talker.text_rows(user_ids)
    assert answer.accepted is not None
    heard[is_media] = talker.media_rows(answer.accepted[torch.from_numpy(rows)[is_media]])
    start = last_assistant_row(
        ids, im_start_id=config["im_start_token_id"], assistant_id=config["assistant_token_id"]
    )
    turn = [*answer.prompt_ids[start:], *answer.tokens[:-1]]  # the last token never becomes a row
    index = talker_rope_index(
        ids[rows], NUM_SPEECH_ROWS, config["tts_pad_token_id"], answer.media, PositionRules.of_talker(config)
    )
    return torch.cat((heard, talker.speech_rows(turn[:4], SPEAKER))), index, turn[4:]


def text_rows(talker: Talker, tokens: list[int]) -> list[Tensor]:
    """One row of text for every step, for as long as a test runs."""
    rows = list(talker.text_rows(torch.tensor(tokens))) if tokens else []
    return [*rows, talker.closing_row] + [talker.pad_row] * MAX_CODES


class Speech:
    """One request, as the engine would run it: greedy first codes with the reference's adjustments."""

    def __init__(self, talker: Talker, rows: Tensor, index: RopeIndex, tokens: list[int], chunk: int) -> None:
        self.talker, self.index = talker, index
        self.text = text_rows(talker, tokens)
        self.run = PagedRun(talker, rows.shape[0] + MAX_CODES)
        self.hidden = self.run.prefill(rows, index.positions, chunk)[0][-1:]
        self.first_codes: list[int] = []
        self.frames: list[Tensor] = []
        self._adjust = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(REPETITION_PENALTY),
                SuppressTokensLogitsProcessor(list(talker.talker_config.suppressed_codes)),
            ]
        )
        self.pick()

    def pick(self) -> None:
        """The next frame's first code, or the end of the speech."""
        said = torch.tensor([self.first_codes], dtype=torch.int64)
        code = int(self._adjust(said, self.talker.logits(self.hidden)).argmax())
        self.first_codes.append(code)
        self.is_done = code == self.talker.talker_config.codec_eos_id or len(self.first_codes) == MAX_CODES

    def step(self, frame: Tensor, row: Tensor) -> None:
        self.frames.append(frame)
        self.hidden = self.run.forward(row, self.index.following(self.run.num_rows, 1))
        self.pick()


def speak_together(speeches: list[Speech]) -> None:
    """All frames, the residual codes of all speeches in one batch."""
    while going := [speech for speech in speeches if not speech.is_done]:
        frames, parts = going[0].talker.next_input(
            torch.cat([speech.hidden for speech in going]),
            torch.tensor([speech.first_codes[-1] for speech in going]),
            [GREEDY] * len(going),
        )
        rows = parts + torch.stack([speech.text[len(speech.frames)] for speech in going])
        for index, speech in enumerate(going):
            speech.step(frames[index], rows[index : index + 1])


@pytest.mark.parametrize("case", OMNI_CASES)
def test_prompt_equals_transformers(case, talker, config, qwen3_omni_dir):
    answer = omni_answer(qwen3_omni_dir, case)
    with torch.inference_mode():
        rows, index, _ = spoken_prompt(talker, config, answer)
    torch.testing.assert_close(rows, answer.talker_rows, atol=TOLERANCE, rtol=0)
    assert answer.talker_positions is not None
    np.testing.assert_array_equal(index.positions, answer.talker_positions.float().numpy())


@pytest.mark.parametrize(("case", "chunk"), [*((case, 64) for case in OMNI_CASES), ("image", 1), ("all", 7)])
def test_greedy_codes_equal_transformers(case, chunk, talker, config, qwen3_omni_dir):
    answer = omni_answer(qwen3_omni_dir, case)
    with torch.inference_mode():
        speech = Speech(talker, *spoken_prompt(talker, config, answer), chunk)
        speak_together([speech])
    codes = torch.stack(speech.frames)
    assert codes.tolist() == answer.codes.tolist()
    assert codes[:, 0].tolist() == RECORDED["qwen3_omni"][case]["first_codes"]


def test_a_batch_says_what_each_says_alone(talker, config, qwen3_omni_dir):
    answers = [omni_answer(qwen3_omni_dir, case) for case in OMNI_CASES]
    with torch.inference_mode():
        speeches = [Speech(talker, *spoken_prompt(talker, config, answer), 64) for answer in answers]
        speak_together(speeches)
    for speech, answer in zip(speeches, answers, strict=True):
        assert torch.stack(speech.frames).tolist() == answer.codes.tolist()


def random_talker(directory: Path, data: st.DataObject) -> tuple[Any, Talker]:
    """transformers' talker and ours, of a directory laid out as Qwen3-Omni's."""
    draw = data.draw
    config = omni_config(dict.fromkeys(SPECIAL_TOKENS, 5), dict.fromkeys(ROLES, 6))
    part = config["talker_config"]
    num_groups, hidden = draw(st.integers(2, 6)), draw(st.sampled_from([24, 32]))
    kv_heads, experts = draw(st.integers(1, 2)), draw(st.integers(1, 6))
    part.update(num_code_groups=num_groups, thinker_hidden_size=draw(st.sampled_from([24, 40])))
    part["text_config"].update(
        hidden_size=hidden,
        num_hidden_layers=draw(st.integers(1, 2)),
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * draw(st.integers(1, 3)),
        num_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)),
        norm_topk_prob=draw(st.booleans()),
        shared_expert_intermediate_size=draw(st.sampled_from([8, 20])),
        mlp_only_layers=draw(st.sampled_from([[], [0]])),  # which the talker does not heed
    )
    predictor_heads = draw(st.integers(1, 3))
    part["code_predictor_config"].update(
        hidden_size=hidden,
        num_code_groups=num_groups,
        vocab_size=draw(st.sampled_from([50, 128])),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_key_value_heads=predictor_heads,
        num_attention_heads=predictor_heads * draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from([8, 16])),
        attention_bias=draw(st.booleans()),
    )
    table_size = config["thinker_config"]["text_config"]["vocab_size"]
    reference = Qwen3OmniMoeTalkerForConditionalGeneration(Qwen3OmniMoeTalkerConfig(**part)).eval()
    init_weights(reference)
    tensors = {f"talker.{name}": tensor for name, tensor in published_tensors(reference).items()}
    tensors["thinker.model.embed_tokens.weight"] = torch.randn(table_size, part["thinker_hidden_size"])
    save_shards(tensors, directory)
    write_json(directory / "config.json", config)
    return reference, load_talker(directory, dtype=torch.float32)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(data=st.data())
def test_random_configurations(tmp_path_factory, data):
    reference, talker = random_talker(tmp_path_factory.mktemp("talker"), data)
    num_requests, size = data.draw(st.integers(1, 5)), talker.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, size, generator=generator)
    positions = 30 * torch.rand(3, 9, generator=generator)
    hidden = torch.randn(num_requests, size, generator=generator)
    text = torch.randn(num_requests, size, generator=generator)
    first = torch.randint(2048, (num_requests,), generator=generator)
    greedy = GenerationConfig(do_sample=False, max_new_tokens=talker.talker_config.num_groups - 1)
    with torch.inference_mode():
        expected = reference.model(inputs_embeds=rows[None], position_ids=positions[:, None])
        run = PagedRun(talker, 9)
        ours, _ = run.prefill(rows, positions, 4)
        logits = reference.codec_head(expected.last_hidden_state[0])
        allowed = [
            code for code in range(logits.shape[1]) if code not in talker.talker_config.suppressed_codes
        ]
        found = talker.logits(ours)
        torch.testing.assert_close(found[:, allowed], logits[:, allowed], atol=TOLERANCE, rtol=0)
        assert bool(found[:, list(talker.talker_config.suppressed_codes)].isneginf().all())
        frames, parts = talker.next_input(hidden, first, [GREEDY] * num_requests)
        inputs = parts + text
        assert torch.equal(talker.frame_rows(frames), parts)
        started = torch.stack((reference.model.norm(hidden), reference.model.codec_embedding(first)), dim=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codes = reference.code_predictor.generate(inputs_embeds=started, generation_config=greedy)
        tables = reference.code_predictor.get_input_embeddings()
        total = started[:, 1] + sum(table(codes[:, index]) for index, table in enumerate(tables)) + text
    assert frames.tolist() == torch.cat((first[:, None], codes), dim=1).tolist()
    torch.testing.assert_close(inputs, total, atol=TOLERANCE, rtol=0)


class Fixed(CodeSampling):
    """Draws a number given in advance."""

    def uniform(self, codebook: int) -> float:
        return self.position / 1000


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 50, 0.8), (0.7, 5, 1.0), (1.3, 0, 0.5), (0.9, 0, 1.0), (1.0, 1, 0.8)],
)
def test_sampling_follows_transformers_distribution(temperature, top_k, top_p):
    logits = 2 * torch.randn(1, 60, generator=torch.Generator().manual_seed(3))
    processors = LogitsProcessorList([TopKLogitsWarper(top_k)] if top_k else [])
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    expected = processors(torch.empty(1, 0, dtype=torch.int64), logits / temperature).softmax(-1)[0]
    draws = [
        Fixed(temperature=temperature, top_k=top_k, top_p=top_p, position=position)
        for position in range(1000)
    ]
    codes = CodePicker(draws)(logits.expand(1000, -1), 1)
    frequencies = torch.bincount(codes, minlength=60) / 1000
    torch.testing.assert_close(frequencies, expected, atol=2e-3, rtol=0)
    assert not frequencies[expected == 0].any()


def test_noise_is_a_function_of_its_key():
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(0)).expand(1, -1)
    keys = [
        CodeSampling(
            temperature=1.0, top_k=0, top_p=1.0, seed=seed, choice=choice, stage=stage, position=position
        )
        for seed, choice, stage, position in [
            (1, 0, "talker", 0),
            (2, 0, "talker", 0),
            (1, 1, "talker", 0),
            (1, 0, "other", 0),
            (1, 0, "talker", 1),
        ]
    ]
    alone = [int(CodePicker([key])(logits, codebook)) for key in keys for codebook in (1, 2)]
    assert len(set(alone)) == len(alone)
    mixed = [keys[3], GREEDY, *keys]
    together = CodePicker(mixed)(logits.expand(len(mixed), -1), 2).tolist()
    assert together == [alone[7], int(logits.argmax()), *alone[1::2]]


def test_sampled_frames_do_not_depend_on_the_batch(talker):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(6, 32, generator=generator)
    first = torch.randint(2048, (6,), generator=generator)
    noise = [CodeSampling(temperature=0.9 * (index % 3 > 0), seed=index, position=4) for index in range(6)]
    with torch.inference_mode():
        frames, rows = talker.next_input(hidden, first, noise)
        order = [4, 2, 0]
        again, _ = talker.next_input(hidden[order], first[order], [noise[i] for i in order])
        assert again.tolist() == frames[order].tolist()
        for index in range(6):
            part = slice(index, index + 1)
            alone, row = talker.next_input(hidden[part], first[part], noise[part])
            assert alone.tolist() == frames[part].tolist()
            torch.testing.assert_close(row, rows[part], atol=1e-5, rtol=0)


def test_bfloat16(qwen3_omni_dir, talker):
    half = load_talker(qwen3_omni_dir, dtype=torch.bfloat16)
    assert half.weight_bytes == talker.weight_bytes / 2
    rows = half.speech_rows([1, 2, 3, 4], SPEAKER)
    torch.testing.assert_close(rows.float(), talker.speech_rows([1, 2, 3, 4], SPEAKER), atol=0.1, rtol=0.02)
    with torch.inference_mode():
        hidden, _ = PagedRun(half, 9).prefill(rows, torch.arange(9), 5)
        _, row = half.next_input(hidden[-2:], torch.tensor([3, 4]), [GREEDY, CodeSampling(temperature=1.0)])
    assert row.dtype == hidden.dtype == torch.bfloat16
    assert row.isfinite().all()


def test_what_config_json_says(talker, qwen3_omni_dir):
    reference = load(qwen3_omni_dir).config.talker_config
    settings_ = talker.talker_config
    assert settings_.speaker_code("CHELSIE") == reference.speaker_id["chelsie"]
    assert settings_.codec_eos_id == reference.codec_eos_token_id
    assert settings_.accept_layer == reference.accept_hidden_layer
    assert settings_.suppressed_codes == (*range(2048, 2150), *range(2151, 3072))
    with pytest.raises(NotFound, match="voice 'nobody' is not one of aiden, chelsie, ethan"):
        talker.speech_rows([1, 2, 3, 4], "nobody")
    assert talker_config(qwen3_omni_dir).num_groups == 4


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("talker_config", {"num_code_groups": 5}, "5 code groups and its code predictor 4"),
        ("code_predictor_config", {"hidden_size": 48}, "hidden_size is 32 and its code predictor's 48"),
        ("text_config", {"shared_expert_intermediate_size": 31}, "has shape"),
        ("code_predictor_config", {"num_hidden_layers": 3}, "layers.2.* is missing"),
        ("talker_config", {"code_predictor_config": None}, "lacks 'code_predictor_config'"),
    ],
)
def test_what_does_not_fit_is_refused(part, changes, message, config, qwen3_omni_dir, tmp_path):
    changed = read_json(qwen3_omni_dir / "config.json")
    section = changed["talker_config"] if part == "talker_config" else changed["talker_config"][part]
    section.update(changes)
    write_json(tmp_path / "config.json", changed)
    for path in qwen3_omni_dir.glob("model*"):
        shutil.copy(path, tmp_path)
    with pytest.raises(WeightsError, match=message):
        load_talker(tmp_path, dtype=torch.float32)


def test_an_answer_of_two_tokens_speaks_the_first(talker, config, qwen3_omni_dir):
    """The second one is never fed back; text ends after the first."""
    answer = omni_answer(qwen3_omni_dir, "text")
    short = Answer(**{**answer.__dict__, "tokens": answer.tokens[:2], "media": PromptMedia()})
    with torch.inference_mode():
        rows, _, rest = spoken_prompt(talker, config, short)
    assert rest == []
    torch.testing.assert_close(rows, answer.talker_rows, atol=TOLERANCE, rtol=0)
