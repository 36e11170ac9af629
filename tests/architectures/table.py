"""Which architectures are refused, and why; all others that transformers maps are served.

The sentences are those that the engine gives, as far as they are its own. `tests/engine/test_architectures.py` holds
them to the engine, and docs/models.md is made of them.
"""

REFUSED: dict[str, tuple[str, ...]] = {
    "its forward needs more than K and V of tokens": (
        "bart",
        "big_bird",
        "bigbird_pegasus",
        "biogpt",
        "blenderbot",
        "blenderbot-small",
        "cpmant",
        "marian",
        "mbart",
        "megatron-bert",
        "mpt",
        "mpt, no ALiBi",
        "mvp",
        "opt",
        "pegasus",
        "plbart",
        "prophetnet",
        "rembert",
        "roformer",
        "trocr",
        "xglm",
    ),
    "it has layers of kind 'linear_attention'": (
        "bailing_hybrid",
        "bamba",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "mamba",
        "mamba2",
        "minimax",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
    ),
    "its attention is not causal: it looks at later tokens": (
        "bert",
        "bert-generation",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "gemma3_text, both directions",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ),
    "its attention does not go through transformers' attention interface": (
        "codegen",
        "gpt_neox_japanese",
        "openai-gpt",
        "reformer",
        "rwkv",
        "xlm",
        "xlnet",
        "xlstm",
    ),
    "'tandem_paged'": (
        "falcon",
        "falcon, ALiBi",
        "falcon, several KV heads",
        "git",
        "gpt_neo",
        "gptj",
    ),
    "it has layers of kind 'indexed_attention'": (
        "axk2",
        "deepseek_v32",
        "dots3_note",
        "dots3_note_text",
        "glm_moe_dsa",
        "hy_v4",
    ),
    "it has layers of kind 'conv'": (
        "lfm2",
        "lfm2_moe",
        "lfm3",
    ),
    "it has layers of kind 'hybrid', 'hybrid_sliding'": (
        "inkling2_text",
        "inkling_text",
        "zaya, windows",
    ),
    "Multiple valid text configs were found in the model config: ['text_encoder', 'de": (
        "musicgen",
        "musicgen_melody",
    ),
    "TODO WRONG: from the prefix cache, of 5 and 3": (
        "llama, long RoPE",
        "phi3, long RoPE",
    ),
    "The set of layer types producing a cache is different than the set of layer type": (
        "gemma4_assistant",
        "gemma4_unified_assistant",
    ),
    "it has layers of kind 'hybrid'": (
        "falcon_h1",
        "zaya",
    ),
    "it has layers of kind 'hybrid', 'linear_attention'": (
        "zamba",
        "zamba2",
    ),
    "it has layers of kind 'indexed_attention', 'linear_attention'": (
        "qwen4_exp",
        "qwen4_exp_text",
    ),
    "its attention takes 'logits_to_keep', which is not understood here": (
        "got_ocr2",
        "whisper",
    ),
    "its forward needs more than K and V of tokens: the model asks its cache for 'get_mask_sizes', which is not K and V of tokens": (
        "bloom",
        "bloom, slow but exact",
    ),
    "TODO WRONG: alone, of 37 and 70 tokens; from ": ("moshi",),
    "TODO failed: AttributeError: '_Product' objec": ("hunyuan_v1_moe",),
    "TODO failed: ImportError: TimmWrapperModel re": ("gemma3n",),
    "it has layers of kind 'compressed_sparse_attention', 'heavily_compressed_attention'": (
        "deepseek_v4",
    ),
    "it has layers of kind 'linear_attention', 'mlp', 'moe'": ("nemotron_h",),
    "it has layers of kind 'minimax_m3_sparse'": ("minimax_m3_vl_text",),
    "it makes an attention mask of its own": ("doge",),
    "its forward needs more than K and V of tokens: the model asks its cache for 'is_initialized', which is not K and V of tokens": (
        "hrm_text",
    ),
    "its forward needs more than K and V of tokens: the model asks its cache for 'layers', which is not K and V of tokens": (
        "mllama",
    ),
    "its forward needs more than K and V of tokens: the model asks its cache for 'self_attention_cache', which is not K and V of tokens": (
        "blt",
    ),
    "layer 0 attends twice, which needs K and V of its own for each time": ("diffllama",),
    "with its own weights, the logits of this engine are off transformers' by": ("phimoe",),
}

WHY = {name: why for why, names in REFUSED.items() for name in names}
