"""What llama.cpp (the version the build pins) does for each architecture: which memory, which RoPE.

Facts read from its model code, by the names used in GGUF files. Architectures it names but cannot load
(gptj), and clip, which is no language model, are left out.
"""

from __future__ import annotations

__all__ = [
    "ALIBI_ALWAYS",
    "ARCHITECTURES",
    "DIFFUSION",
    "DRAFT",
    "ENCODER",
    "ENCODER_DECODER",
    "HYBRID",
    "IMROPE",
    "LATENT",
    "LEARNED_POSITIONS",
    "MROPE",
    "MROPE_IF_SECTIONS",
    "NEOX",
    "NORM",
    "NO_ROPE",
    "RECURRENT",
    "SPECIAL_MEMORY",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# RoPE on pairs of neighbouring values.
NORM = _names(
    """
    llama llada llama4 deci baichuan starcoder internlm2 minicpm xverse command-r cohere2 cohere2moe olmo
    arctic deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 muse-glimmer plm chatglm granite granitemoe
    granitehybrid graniteswitch granite_swa chameleon bailingmoe neo-bert smollm3 arcee ernie4_5 ernie4_5-moe
    mistral3 eagle3 mistral4 llama-embed maincoder glm-dsa dots3note nanbeige pockettts hy_v4 bailingmoe3 glm4
    """
)
# RoPE on pairs that lie n_rot / 2 apart.
NEOX = _names(
    """
    falcon falcon-h1 grok dbrx bert jina-bert-v3 modern-bert nomic-bert nomic-bert-moe eurobert stablelm
    bitnet qwen qwen2 dream qwen2moe qwen3 qwen3moe llada-moe rnd1 olmo2 olmoe phi2 phi3 phimoe plamo plamo2
    plamo3 gemma gemma2 gemma3 gemma3n gemma4 gemma4-assistant gemma-embedding starcoder2 openelm gptneox
    codeshell orion nemotron exaone exaone4 exaone-moe minicpm3 bailingmoe2 dots1 hunyuan-moe jais2 gpt-oss
    hunyuan-dense hy_v3 lfm2 lfm2moe smallthinker seed_oss grovemoe apertus minimax-01 minimax-m2 minimax-m3
    cogvlm pangu-embedded afmoe laguna qwen3next mimo2 step35 spark2_5 talkie mellum maple hrm_text glm4moe
    hunyuan_vl dflash
    """
)
MROPE = _names("qwen2vl paddleocr")
IMROPE = _names("qwen3vl qwen3vlmoe qwen35 qwen35moe qwen4exp qwen3tts")
# M-RoPE when the file carries sections, plain RoPE otherwise.
MROPE_IF_SECTIONS = _names("bailingmoe3 glm4 glm4moe hunyuan_vl dflash")
NO_ROPE = _names(
    """
    gpt2 mpt refact bloom mamba mamba2 jamba jina-bert-v2 t5 t5encoder jais rwkv6 rwkv6qwen2 rwkv7 arwkv7
    wavtokenizer-dec nemotron_h nemotron_h_moe kimi-linear kimi-k3 glm5-next
    """
)

ARCHITECTURES = NORM | NEOX | MROPE | IMROPE | NO_ROPE

RECURRENT = _names("mamba mamba2 rwkv6 rwkv6qwen2 rwkv7 arwkv7")
# Attention beside recurrent state.
HYBRID = _names(
    """
    jamba falcon-h1 plamo2 granitehybrid lfm2 lfm2moe nemotron_h nemotron_h_moe qwen3next kimi-linear
    bailingmoe3 kimi-k3 qwen35 qwen35moe minimax-01
    """
)
# No memory at all: the whole input is seen at once.
ENCODER = _names(
    """
    bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe neo-bert eurobert modern-bert gemma-embedding
    wavtokenizer-dec t5encoder
    """
)
DIFFUSION = _names("dream llada llada-moe rnd1")
ENCODER_DECODER = _names("t5")
# Small models that guess tokens for another one and read its cache or hidden states.
DRAFT = _names("eagle3 dflash gemma4-assistant")
# Memories with parts that index cells in their own way. hy_v4 has one only when its file has an indexer.
SPECIAL_MEMORY = {
    "minimax-m3": "a block-sparse attention cache with an indexer (MSA)",
    "deepseek32": "a DeepSeek sparse attention cache with an indexer (DSA)",
    "glm-dsa": "a DeepSeek sparse attention cache with an indexer (DSA)",
    "hy_v4": "a DeepSeek sparse attention cache with an indexer (DSA)",
    "dots3note": "a DeepSeek sparse attention cache with an indexer and a sliding window (DSA-iSWA)",
    "deepseek4": "a compressing attention cache (DeepSeek V4)",
    "glm5-next": "a hybrid memory with an indexer cache",
    "qwen4exp": "a hybrid memory with an indexer cache",
    "graniteswitch": "an adapter-routing layer in the cache",
}

# Keys and values are projected from a latent; in a key the rotated part stands last.
LATENT = _names(
    """
    bailingmoe3 deepseek2 deepseek32 mistral4 dots3note glm-dsa glm5-next hy_v4 kimi-k3 kimi-linear minicpm3
    plm
    """
)
LEARNED_POSITIONS = _names("gpt2 starcoder")
ALIBI_ALWAYS = _names("bloom refact jina-bert-v2")
