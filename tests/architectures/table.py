"""Refused architectures by reason; all others that transformers maps are served.

The reasons are substrings of the errors that the engine raises; `tests/engine/test_architectures.py` checks them, and
docs/models.md is generated from them. A case is named by its `model_type`, with its variant after a comma.
"""

_REFUSED = {
    "its attention does not go through transformers' attention interface": (
        "big_bird; bloom; bloom, slow but exact; codegen; cpmant; falcon; falcon, ALiBi; "
        "falcon, several KV heads; git; gpt_neo; gpt_neox_japanese; gptj; megatron-bert; mllama; "
        "openai-gpt; reformer; rembert; roformer; rwkv; trocr; xglm; xlm; xlnet; xlstm"
    ),
    "it has layers of kind 'linear_attention'": (
        "bailing_hybrid; bamba; falcon_mamba; granitemoehybrid; jamba; kimi_linear; mamba; "
        "mamba2; minimax; olmo_hybrid; qwen3_5; qwen3_5_moe; qwen3_5_moe_text; qwen3_5_text; "
        "qwen3_next; recurrent_gemma"
    ),
    "it is an encoder-decoder model": (
        "bart; bigbird_pegasus; blenderbot; blenderbot-small; marian; mbart; musicgen; "
        "musicgen_melody; mvp; pegasus; plbart; prophetnet; whisper"
    ),
    "its attention is not causal": (
        "bert; bert-generation; camembert; data2vec-text; electra; ernie; gemma3_text, both "
        "directions; roberta; roberta-prelayernorm; roc_bert; xlm-roberta; xlm-roberta-xl; "
        "xmod"
    ),
    "it has layers of kind 'indexed_attention'": "axk2; deepseek_v32; dots3_note; dots3_note_text; glm_moe_dsa; hy_v4",
    "it has layers of kind 'conv'": "lfm2; lfm2_moe; lfm3",
    "it has layers of kind 'hybrid', 'hybrid_sliding'": "inkling2_text; inkling_text; zaya, windows",
    "The set of layer types producing a cache is different than the set of layer types using them": "gemma4_assistant; gemma4_unified_assistant",
    "it has layers of kind 'hybrid'": "falcon_h1; zaya",
    "it has layers of kind 'hybrid', 'linear_attention'": "zamba; zamba2",
    "it has layers of kind 'indexed_attention', 'linear_attention'": "qwen4_exp; qwen4_exp_text",
    "its forward needs more than tokens and their positions": "mpt; mpt, no ALiBi",
    "layer 0 attends twice": "diffllama; hrm_text",
    "TimmWrapperModel requires the timm library": "gemma3n",
    "it has layers of kind 'compressed_sparse_attention', 'heavily_compressed_attention'": "deepseek_v4",
    "it has layers of kind 'linear_attention', 'mlp', 'moe'": "nemotron_h",
    "it has layers of kind 'minimax_m3_sparse'": "minimax_m3_vl_text",
    "it makes its own attention mask": "doge",
    "its config has no num_hidden_layers, so it is not a single stack of text layers": "blt",
    "with its own weights, its logits differ from transformers'": "moshi",
}

REFUSED = {why: tuple(names.split("; ")) for why, names in _REFUSED.items()}
WHY = {name: why for why, names in REFUSED.items() for name in names}
