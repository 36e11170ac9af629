"""Layouts of tokenizer directories as models are published, with small vocabularies.

A layout is one of the tokenizers below with other files beside its `tokenizer.json`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import (
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 12345 + 67.",
    "def f(x):\n    return x ** 2  # comment\n",
    "user: What is the capital of France?\nassistant: The capital of France is Paris.",
    "Über die Straße, ça va ! 日本語のテキスト",
] * 4
BYTES = pre_tokenizers.ByteLevel.alphabet()
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


# ── tokenizer.json ───────────────────────────────────────────────────────────────────────────────


def _bpe(specials: list[str], alphabet: list[str], **options: Any) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
        **options,
    )


def gpt2() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(CORPUS, _bpe(["<|endoftext|>"], BYTES))
    made.post_processor, made.decoder = processors.ByteLevel(), decoders.ByteLevel()
    return made


def _split_bytes(specials: list[str], pattern: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.train_from_iterator(CORPUS, _bpe(specials, BYTES))
    made.decoder = decoders.ByteLevel()
    return made


def llama3() -> tokenizers.Tokenizer:
    begin = "<|begin_of_text|>"
    made = _split_bytes([begin, "<|end_of_text|>", "<|eot_id|>"], LLAMA3_SPLIT)
    template = processors.TemplateProcessing(
        single=f"{begin} $A", pair=None, special_tokens=[(begin, 0)]
    )
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return made


def qwen() -> tokenizers.Tokenizer:
    made = _split_bytes(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], QWEN_SPLIT)
    made.normalizer = normalizers.NFC()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def _sentencepiece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)"), "isolated")  # for training only
    specials = ["<unk>", "<s>", "</s>", *FALLBACK]
    made.train_from_iterator(CORPUS, _bpe(specials, []))
    # The trainer marks all as special; published files have only the first three.
    state = json.loads(made.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    made = tokenizers.Tokenizer.from_str(json.dumps(state))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 1)]
    )
    return made


def llama2() -> tokenizers.Tokenizer:
    made = _sentencepiece()
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.pre_tokenizer = None
    made.decoder = _sentencepiece_decoder(strips=True)
    return made


def mistral() -> tokenizers.Tokenizer:
    made = _sentencepiece()
    made.normalizer = None
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    made.decoder = _sentencepiece_decoder(strips=True)
    return made


def gemma() -> tokenizers.Tokenizer:
    made = _sentencepiece()
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = _sentencepiece_decoder(strips=False)
    return made


def _sentencepiece_decoder(*, strips: bool) -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strips)


def unigram() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<s>", "</s>", "<unk>"]
    made.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=specials, unk_token="<unk>", show_progress=False
        ),
    )
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair=None, special_tokens=[("</s>", 1)]
    )
    made.decoder = decoders.Metaspace()
    return made


def wordlevel() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = ["<unk>", "<s>", "</s>"]
    made.train_from_iterator(
        CORPUS, trainers.WordLevelTrainer(special_tokens=specials, show_progress=False)
    )
    return made


def wordpiece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False),
    )
    made.decoder = decoders.WordPiece()
    return made


def suffixed() -> tokenizers.Tokenizer:
    """Pieces of words with a mark at the word's end, as GPT-1 has them."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(CORPUS, _bpe(["<unk>"], [], end_of_word_suffix="</w>"))
    made.decoder = decoders.BPEDecoder("</w>")
    return made


# ── the other files ──────────────────────────────────────────────────────────────────────────────

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOL_TEMPLATE = "{{ bos_token }}{{ tools | length }} tools: {{ tools[0].function.name }}" + TEMPLATE
NAMED = [
    {"name": "default", "template": TEMPLATE},
    {"name": "tool_use", "template": TOOL_TEMPLATE},
]


def added(text: str, **flags: bool) -> dict[str, Any]:
    """A token as special_tokens_map.json and added_tokens_decoder describe it."""
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False} | flags
    return {"content": text, **flags}


def as_map(tokens: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Special tokens as objects of special_tokens_map.json."""
    return {name: added(text) for name, text in tokens.items()}


def typed(tokens: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Special tokens as objects of tokenizer_config.json."""
    return {name: added(text) | {"__type": "AddedToken"} for name, text in tokens.items()}


S = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
ENDOFTEXT = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
LLAMA3 = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
SHORT = {"model_max_length": 8}
CLEAN_UP = {"clean_up_tokenization_spaces": True}


@dataclass(frozen=True, slots=True)
class Layout:
    """A directory of tokenizer files.

    Attributes:
        base: Makes the tokenizer.json.
        config: The tokenizer_config.json, or None. `chat_template` is added unless a file has it.
        model: The model_type in config.json, if there is one.
        files: Files by name, in addition or instead: text, or a value for JSON.
        change: Changes the tokenizer.json.
    """

    base: Callable[[], tokenizers.Tokenizer]
    config: Mapping[str, Any] | None = None
    model: str = ""
    files: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[dict[str, Any]], object] = lambda _state: None

    def write(self, directory: Path, made: tokenizers.Tokenizer) -> None:
        """Write the files; `made`: what `base` makes."""
        state = json.loads(made.to_str())
        self.change(state)
        files: dict[str, Any] = {"tokenizer.json": state}
        has_template = any("chat_template" in name for name in self.files)
        if self.config is not None:
            own = {} if has_template else {"chat_template": TEMPLATE}
            files["tokenizer_config.json"] = own | dict(self.config)
        if self.model:
            files["config.json"] = {"model_type": self.model}
        for name, content in (files | dict(self.files)).items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))


def without(*tokens: str) -> Callable[[dict[str, Any]], object]:
    """Remove tokens from the added ones; they stay in the vocabulary."""

    def change(state: dict[str, Any]) -> None:
        state["added_tokens"] = [
            each for each in state["added_tokens"] if each["content"] not in tokens
        ]

    return change


def with_limits(state: dict[str, Any]) -> None:
    """Add the sections that training code leaves behind."""
    state["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    state["padding"] = {
        "strategy": {"Fixed": 12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }


def metaspace(scheme: str) -> Callable[[dict[str, Any]], object]:
    """Set where the pre-tokenizer adds a space."""

    def change(state: dict[str, Any]) -> None:
        state["pre_tokenizer"]["prepend_scheme"] = scheme

    return change


def of(kind: str, *more: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """A tokenizer_config.json of a class."""
    config: dict[str, Any] = {"tokenizer_class": kind}
    for each in more:
        config |= each
    return config | values


FAST, LLAMA = "PreTrainedTokenizerFast", "LlamaTokenizer"
LISTED = {
    "700": added("<|im_start|>", special=True),
    "701": added("<tool>", special=False, normalized=True),
}

LAYOUTS = {
    # byte-level, one regular expression: GPT-2, GPT-NeoX, Falcon, StarCoder
    "gpt2 alone": Layout(gpt2, None, files={"chat_template.jinja": TEMPLATE}),
    "gpt2": Layout(gpt2, of("GPT2Tokenizer", ENDOFTEXT, SHORT, add_prefix_space=False), "gpt2"),
    "gpt2 adds bos": Layout(gpt2, of("GPT2Tokenizer", ENDOFTEXT, add_bos_token=True), "gpt2"),
    "gpt2 with prefix space": Layout(gpt2, of("GPT2Tokenizer", ENDOFTEXT, add_prefix_space=True)),
    "gpt2 map of texts": Layout(
        gpt2, of("GPT2Tokenizer"), "gpt2", {"special_tokens_map.json": ENDOFTEXT}
    ),
    "gpt2 map of objects": Layout(
        gpt2, of("GPT2Tokenizer"), "gpt2", {"special_tokens_map.json": as_map(ENDOFTEXT)}
    ),
    "gpt2 added_tokens": Layout(
        gpt2,
        of("GPT2Tokenizer", ENDOFTEXT),
        "gpt2",
        {"added_tokens.json": {"<|im_start|>": 700, "<tool>": 701}},
    ),
    "neox": Layout(gpt2, of("GPTNeoXTokenizer", ENDOFTEXT), "gpt_neox"),
    "neox fast": Layout(
        gpt2, of("GPTNeoXTokenizerFast", ENDOFTEXT, add_bos_token=False), "gpt_neox"
    ),
    "gpt2 truncates and pads": Layout(
        gpt2, of("GPT2Tokenizer", ENDOFTEXT, SHORT), "gpt2", change=with_limits
    ),
    "gpt2 fast truncates and pads": Layout(gpt2, of(FAST, ENDOFTEXT), change=with_limits),
    "starcoder": Layout(
        gpt2,
        of(
            "GPT2Tokenizer",
            ENDOFTEXT,
            additional_special_tokens=["<|endoftext|>", "<fim_prefix>", "<fim_suffix>"],
        ),
        "starcoder2",
    ),
    # byte-level, split: Llama 3, SmolLM 3, DeepSeek
    "llama3": Layout(llama3, of(FAST, LLAMA3, CLEAN_UP, added_tokens_decoder=LISTED), "llama"),
    "llama3 backend": Layout(llama3, of("TokenizersBackend", LLAMA3), "llama"),
    "llama3 adds eos": Layout(llama3, of(FAST, LLAMA3, add_eos_token=True), "llama"),
    "llama3 without bos": Layout(llama3, of(FAST, LLAMA3, add_bos_token=False), "llama"),
    "llama3 without a class": Layout(llama3, {**LLAMA3}, "llama"),
    "llama3 extra list": Layout(
        llama3, of(FAST, LLAMA3, extra_special_tokens=["<|im_start|>", "<|tool|>"]), "llama"
    ),
    "llama3 eos unlisted": Layout(
        llama3, of(FAST, LLAMA3), "llama", change=without("<|eot_id|>", "<|end_of_text|>")
    ),
    "llama3 eos of the map": Layout(
        llama3,
        of(FAST, LLAMA3),
        "llama",
        {"special_tokens_map.json": as_map({"eos_token": "<|end_of_text|>"})},
    ),
    "llama3 named as llama": Layout(llama3, of(LLAMA, LLAMA3, legacy=True), "llama"),
    "deepseek": Layout(llama3, of("LlamaTokenizerFast", typed(LLAMA3), legacy=True), "deepseek_v3"),
    "deepseek distill": Layout(
        llama3, of("LlamaTokenizerFast", typed(LLAMA3), add_bos_token=True), "qwen2"
    ),
    "llama3 jinja": Layout(
        llama3, of(FAST, LLAMA3), "llama", {"chat_template.jinja": "file" + TEMPLATE}
    ),
    "llama3 jinja over config": Layout(
        llama3,
        of(FAST, LLAMA3, chat_template="config" + TEMPLATE),
        files={"chat_template.jinja": "file" + TEMPLATE},
    ),
    "command-r named templates": Layout(
        llama3, of("CohereTokenizerFast", LLAMA3, chat_template=NAMED), "cohere"
    ),
    "llama3 additional templates": Layout(
        llama3,
        of(FAST, LLAMA3),
        "llama",
        {
            "chat_template.jinja": TEMPLATE,
            "additional_chat_templates/tool_use.jinja": TOOL_TEMPLATE,
        },
    ),
    # byte-level, NFC: Qwen
    "qwen2": Layout(
        qwen, of("Qwen2Tokenizer", QWEN, added_tokens_decoder=LISTED, add_bos_token=False), "qwen2"
    ),
    "qwen3": Layout(qwen, of("Qwen2Tokenizer", QWEN), "qwen3"),
    "qwen fast": Layout(qwen, of("Qwen2TokenizerFast", QWEN, SHORT)),
    "qwen named tokens": Layout(
        qwen,
        of(
            "Qwen2Tokenizer",
            QWEN,
            extra_special_tokens={"image_token": "<|image_pad|>", "video": "<|video_pad|>"},
            chat_template="{{ image_token }}{{ video }}" + TEMPLATE,
        ),
    ),
    "qwen own name of a token": Layout(
        qwen,
        of("Qwen2Tokenizer", QWEN, boi_token="<boi>", chat_template="{{ boi_token }}" + TEMPLATE),
    ),
    "qwen splits special tokens": Layout(
        qwen, of("Qwen2Tokenizer", QWEN, split_special_tokens=True), "qwen3"
    ),
    "qwen other split": Layout(
        qwen,
        of("Qwen2Tokenizer", QWEN),
        "qwen3",
        change=lambda state: state["pre_tokenizer"]["pretokenizers"].pop(0),
    ),
    # sentencepiece with a prefix before everything: Llama 2, TinyLlama, Vicuna
    "llama2": Layout(
        llama2, of(LLAMA, typed(S), legacy=False, add_bos_token=True, add_eos_token=False), "llama"
    ),
    "llama2 legacy": Layout(llama2, of(LLAMA, S, legacy=True), "llama"),
    "llama2 fast": Layout(llama2, of("LlamaTokenizerFast", S, CLEAN_UP)),
    "llama2 plain": Layout(llama2, of(FAST, S)),
    "llama2 adds eos": Layout(llama2, of("LlamaTokenizerFast", S, add_eos_token=True), "llama"),
    "llama2 eos unlisted": Layout(llama2, of(FAST, S), change=without("</s>", "<unk>")),
    "llama2 eos unlisted, class": Layout(llama2, of(LLAMA, S), "llama", change=without("</s>")),
    "llama2 files of vicuna": Layout(
        llama2,
        of(LLAMA, S),
        "llama",
        {"special_tokens_map.json": as_map(S), "added_tokens.json": {"<|im_start|>": 700}},
    ),
    "llama2 no prefix space": Layout(llama2, of(LLAMA, S, add_prefix_space=False), "llama"),
    "codellama": Layout(
        llama2, of("CodeLlamaTokenizer", S, prefix_token=None, suffix_token=None), "llama"
    ),
    "phi3": Layout(
        llama2,
        of(
            LLAMA,
            S,
            legacy=False,
            added_tokens_decoder={"700": added("<|im_start|>", rstrip=True, special=True)},
        ),
        "phi3",
    ),
    # sentencepiece with Metaspace: Mistral, Mixtral, Yi
    "mistral": Layout(mistral, of(LLAMA, S, legacy=False, add_prefix_space=None), "mistral"),
    "mistral plain": Layout(mistral, of(FAST, S)),
    "mistral always": Layout(mistral, of("LlamaTokenizerFast", S), change=metaspace("always")),
    "mistral never": Layout(mistral, of(FAST, S), change=metaspace("never")),
    "mistral flags": Layout(
        mistral,
        of(
            FAST,
            S,
            added_tokens_decoder={
                "700": added("[INST]", lstrip=True, rstrip=True, special=True),
                "701": added("assistant", single_word=True, normalized=True, special=False),
            },
        ),
    ),
    # sentencepiece without a prefix: Gemma
    "gemma": Layout(gemma, of("GemmaTokenizer", S, add_bos_token=True), "gemma2"),
    "gemma fast": Layout(gemma, of("GemmaTokenizerFast", typed(S)), "gemma"),
    "gemma extra": Layout(
        gemma, of("GemmaTokenizerFast", S, additional_special_tokens=["<|im_start|>"]), "gemma3"
    ),
    # Unigram: llm-jp, rinna
    "unigram": Layout(unigram, of(FAST, S)),
    "unigram cleaned": Layout(unigram, of(FAST, S, CLEAN_UP)),
    "unigram t5": Layout(unigram, of("T5Tokenizer", S), "gpt_neox"),
    "unigram extra": Layout(unigram, of(FAST, S, additional_special_tokens=["<|im_start|>"])),
    # whole words
    "words": Layout(wordlevel, of(FAST, S)),
    "words cleaned": Layout(wordlevel, of(FAST, S, CLEAN_UP)),
    "wordpiece": Layout(wordpiece, of("BertTokenizerFast", CLEAN_UP, cls_token="[CLS]"), "bert"),
    "suffixed": Layout(
        suffixed, of("OpenAIGPTTokenizer", CLEAN_UP, unk_token="<unk>"), "openai-gpt"
    ),
    "words eos unlisted": Layout(wordlevel, of(FAST, S), change=without("</s>", "<s>")),
}
