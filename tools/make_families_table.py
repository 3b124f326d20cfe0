"""The table of families in `cpuspec/checkpoints/README.md`, which `tools/make_readme_tables.py` writes.

Names in files come from `cpuspec/checkpoints/families.py`; the names that people know, and what differs from the sentence above the
table, from ROWS.
"""

from pathlib import Path

from cpuspec.checkpoints.families import FAMILIES

README = Path(__file__).resolve().parent.parent / "cpuspec" / "checkpoints" / "README.md"

# What people call the models of a family, and a remark on its comparison.
ROWS = {
    "llama": "Llama, SmolLM2, many others (real models, too)",
    "qwen2": "Qwen2, Qwen2.5, MiMo (real models, too)",
    "qwen3": "Qwen3",
    "qwen3moe": "Qwen3-MoE, Qwen3-Coder",
    "qwen2moe": "Qwen2-MoE",
    "qwen35": "Qwen3.5, 3.6 and 3.8 (text)",
    "qwen35moe": "Qwen3.5 and 3.6 MoE (text)",
    "qwen3next": "Qwen3-Next, Qwen3-Coder-Next",
    "lfm2": "LFM2, LFM2.5",
    "lfm2moe": "LFM2 and LFM2.5 8B-A1B, 24B-A2B",
    "granitehybrid": "Granite 4 hybrid (dense)",
    "granitehybrid-moe": "Granite 4 hybrid (mixtures)",
    "mamba2": "Mamba-2, Codestral Mamba",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2",
    "nemotron_h_moe": "Nemotron 3 Nano",
    "falcon-h1": "Falcon-H1",
    "olmoe": "OLMoE (llama.cpp wants as many key heads as query heads)",
    "mixtral": "Mixtral",
    "gpt-oss": "gpt-oss",
    "granite": "Granite 3 and 4 (dense)",
    "granitemoe": "Granite 3 MoE, with and without a shared part",
    "ernie4_5_moe": "ERNIE 4.5 21B-A3B",
    "glm4moe": "GLM-4.5, 4.6, Air",
    "deepseek2": "DeepSeek-V3, R1, Kimi K2",
    "deepseek_v2": "DeepSeek-V2-Lite (llama.cpp wants 26 or 27 layers)",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "mistral4": "Mistral 4 (text)",
    "bailingmoe2": "Ling 2, Ring 2 (with GLM-4.5's class of transformers, which has none of its own)",
    "hunyuan-moe": "Hunyuan-A13B",
    "olmo2": "OLMo 2",
    "seed_oss": "Seed-OSS (llama.cpp: the same top token in 99.8 % of rows)",
    "ernie4_5": "ERNIE 4.5 (dense)",
    "mistral": "Mistral",
    "smollm3": "SmolLM3",
    "gemma2": "Gemma 2",
    "gemma4": "Gemma 4 31B, E2B, E4B (text)",
    "gemma4-moe": "Gemma 4 26B-A4B (text)",
    "gemma4_unified": "Gemma 4 12B (text)",
    "gemma3": "Gemma 3 (text; real models, too)",
    "qwen3vl": "Qwen3-VL (text)",
    "olmo3": "OLMo 3",
    "exaone4": "EXAONE 4",
    "phi3": "Phi-3, Phi-4-mini",
    "glm4": "GLM-4 0414",
    "glm": "GLM-4 (2024)",
    "starcoder2": "StarCoder2",
    "stablelm": "StableLM, Stable Code",
    "cohere": "Command R",
    "cohere2": "Command R7B, A",
    "internlm2": "InternLM2 (with Llama's class of transformers, which has none of its own)",
    "hunyuan_v1_dense": "Hunyuan (dense)",
    "ministral3": "Ministral 3",
    "gemma": "Gemma 1",
}


def families_table() -> str:
    """A row for each family that has one."""
    lines = ["| models | GGUF, `general.architecture` | safetensors, `architectures` |", "|---|---|---|"]
    for name, models in ROWS.items():
        family = FAMILIES[name]
        classes = ", ".join(f"`{one}`" for one in (family.hf_class, family.hf_wrapper, *family.hf_alike) if one)
        lines.append(f"| {models} | `{family.gguf_name}` | {classes} |")
    return "\n".join(lines)
