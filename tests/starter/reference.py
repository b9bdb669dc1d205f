"""transformers' models on the starter's weights, in the plainest use of them."""

from __future__ import annotations

import numpy as np
import torch
import torchaudio
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

TIE = 1e-4  # logits; only where the reference's two best are closer may another token be chosen


class Reference:
    """The thinker.  num_excused: tokens that differed where the reference's two best were a tie."""

    def __init__(self, starter_dir):
        self.directory = starter_dir
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(starter_dir / "thinker")
        self.model = LlamaForCausalLM.from_pretrained(starter_dir / "thinker", dtype=torch.float32).eval()
        self.num_excused = 0

    def prompt(self, messages):
        """Token ids of a conversation of text."""
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    def rows(self, messages, media):
        """Input embeddings [num_rows, hidden].  media: a word in the messages -> the rows in its place.

        Text beside a medium is tokenised by itself, as the prompt's format says.
        """
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        pieces = []
        for word, rows in media.items():
            before, text = text.split(word)
            pieces += [self._embed(self._encode(before)), rows]
        return torch.cat([*pieces, self._embed(self._encode(text))])

    def text_rows(self, text):
        return self._embed(self._encode(text))

    @torch.inference_mode()
    def generate(self, prompt, num_tokens):
        """Greedy tokens of the reference's own loop, past the end of the answer."""
        generated = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return tuple(generated[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def log_probabilities(self, rows, token_ids):
        """[num_tokens, vocab]: of what may stand in each token's place after those before it."""
        if not isinstance(rows, torch.Tensor):
            rows = self._embed(rows)
        inputs = torch.cat([rows, self._embed(token_ids[:-1])])
        return self.model(inputs_embeds=inputs[None]).logits[0, len(rows) - 1 :].log_softmax(-1)

    def assert_greedy(self, rows, token_ids):
        """Every token is the reference's choice given those before it, hence its own greedy output.

        rows: the prompt, as token ids or as embeddings [num_rows, hidden].
        """
        best = self.log_probabilities(rows, token_ids).topk(2, dim=-1)
        differs = best.indices[:, 0] != torch.tensor(token_ids)
        is_tie = best.values[:, 0] - best.values[:, 1] < TIE
        wrong = differs & ~is_tie
        assert not wrong.any(), f"differs at {wrong.nonzero().flatten().tolist()} of {len(token_ids)}"
        self.num_excused += int(differs.sum())

    def _encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _embed(self, token_ids):
        return self.model.get_input_embeddings()(torch.tensor(list(token_ids), dtype=torch.int64)).detach()


class HearingReference:
    """Whisper by transformers' own generate."""

    def __init__(self, starter_dir):
        directory = starter_dir / "hearing"
        self.model = WhisperForConditionalGeneration.from_pretrained(directory).eval()
        self.extractor = WhisperFeatureExtractor.from_pretrained(directory)
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))

    @torch.inference_mode()
    def transcribe(self, samples, sample_rate):
        """Token ids without the special ones, and text.  samples: float32 [num_samples]."""
        sound = torchaudio.functional.resample(torch.from_numpy(samples.copy()), sample_rate, 16_000)
        features = self.extractor(np.asarray(sound), sampling_rate=16_000, return_tensors="pt").input_features
        generated = self.model.generate(features, do_sample=False, num_beams=1, max_new_tokens=200)[0]
        specials = self.model.generation_config.eos_token_id
        token_ids = tuple(token_id for token_id in generated.tolist() if token_id < specials)
        return token_ids, self.tokenizer.decode(token_ids).strip()
