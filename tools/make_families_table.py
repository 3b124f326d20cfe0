"""Make the table of families in `cpuspec/checkpoints/README.md`: run it whenever a family is added or compared again.

    python tools/make_families_table.py

Names in files come from `cpuspec/checkpoints/families.py`; who compared a family with what, from ROWS.
"""

from pathlib import Path
from typing import NamedTuple

from cpuspec.checkpoints.families import FAMILIES

README = Path(__file__).resolve().parent.parent / "cpuspec" / "checkpoints" / "README.md"
START, END = "<!-- made by tools/make_families_table.py -->", "<!-- end of the table of families -->"
BOTH = "transformers, llama.cpp"


class Row(NamedTuple):
    """models: that people know. beside: programs whose logits the family's are compared with. since: the day of the first
    comparison.
    """

    models: str
    beside: str
    since: str


ROWS = {
    "llama": Row("Llama, SmolLM2, many others", f"{BOTH} (also real models)", "2026-11-21"),
    "qwen2": Row("Qwen2, Qwen2.5, MiMo", f"{BOTH} (also real models)", "2026-11-21"),
    "qwen3": Row("Qwen3", BOTH, "2026-11-21"),
    "qwen3moe": Row("Qwen3-MoE, Qwen3-Coder", BOTH, "2026-11-25"),
    "qwen2moe": Row("Qwen2-MoE", BOTH, "2026-11-25"),
    "qwen35": Row("Qwen3.5, 3.6 and 3.8 (text)", BOTH, "2026-11-25"),
    "qwen35moe": Row("Qwen3.5 and 3.6 MoE (text)", BOTH, "2026-11-25"),
    "qwen3next": Row("Qwen3-Next, Qwen3-Coder-Next", BOTH, "2026-11-25"),
    "lfm2": Row("LFM2, LFM2.5", BOTH, "2026-11-25"),
    "lfm2moe": Row("LFM2 and LFM2.5 8B-A1B, 24B-A2B", BOTH, "2026-11-25"),
    "granitehybrid": Row("Granite 4 hybrid (dense)", BOTH, "2026-11-25"),
    "granitehybrid-moe": Row("Granite 4 hybrid (mixtures)", BOTH, "2026-11-25"),
    "mamba2": Row("Mamba-2, Codestral Mamba", BOTH, "2026-11-25"),
    "nemotron_h": Row("Nemotron-H, Nemotron Nano 2", BOTH, "2026-11-25"),
    "nemotron_h_moe": Row("Nemotron 3 Nano", BOTH, "2026-11-25"),
    "falcon-h1": Row("Falcon-H1", BOTH, "2026-11-25"),
    "olmoe": Row("OLMoE", f"{BOTH} (which wants as many key heads as query heads)", "2026-11-25"),
    "mixtral": Row("Mixtral", BOTH, "2026-11-25"),
    "gpt-oss": Row("gpt-oss", BOTH, "2026-11-25"),
    "granite": Row("Granite 3 and 4 (dense)", BOTH, "2026-11-25"),
    "granitemoe": Row("Granite 3 MoE, with and without a shared part", BOTH, "2026-11-25"),
    "ernie4_5_moe": Row("ERNIE 4.5 21B-A3B", BOTH, "2026-11-25"),
    "glm4moe": Row("GLM-4.5, 4.6, Air", BOTH, "2026-11-25"),
    "deepseek2": Row("DeepSeek-V3, R1, Kimi K2", BOTH, "2026-11-25"),
    "deepseek_v2": Row("DeepSeek-V2-Lite", f"{BOTH} (which wants 26 or 27 layers)", "2026-11-25"),
    "glm4_moe_lite": Row("GLM-4.7-Flash", BOTH, "2026-11-25"),
    "mistral4": Row("Mistral 4 (text)", BOTH, "2026-11-25"),
    "bailingmoe2": Row(
        "Ling 2, Ring 2", "transformers (GLM-4.5's class on the same weights; it has none of its own), llama.cpp", "2026-11-25"
    ),
    "hunyuan-moe": Row("Hunyuan-A13B", BOTH, "2026-11-25"),
    "olmo2": Row("OLMo 2", BOTH, "2026-11-25"),
    "seed_oss": Row("Seed-OSS", f"{BOTH} (the same top token in 99.8 % of rows)", "2026-11-25"),
    "ernie4_5": Row("ERNIE 4.5 (dense)", BOTH, "2026-11-25"),
    "mistral": Row("Mistral", BOTH, "2026-11-22"),
    "smollm3": Row("SmolLM3", BOTH, "2026-11-22"),
    "gemma2": Row("Gemma 2", BOTH, "2026-11-22"),
    "gemma4": Row("Gemma 4 31B, E2B, E4B (text)", BOTH, "2026-11-25"),
    "gemma4-moe": Row("Gemma 4 26B-A4B (text)", BOTH, "2026-11-27"),
    "gemma4_unified": Row("Gemma 4 12B (text)", BOTH, "2026-11-27"),
    "gemma3": Row("Gemma 3 (text)", f"{BOTH} (also real models)", "2026-11-22"),
    "qwen3vl": Row("Qwen3-VL (text)", BOTH, "2026-11-25"),
    "olmo3": Row("OLMo 3", BOTH, "2026-11-25"),
    "exaone4": Row("EXAONE 4", BOTH, "2026-11-25"),
    "phi3": Row("Phi-3, Phi-4-mini", BOTH, "2026-11-25"),
    "glm4": Row("GLM-4 0414", BOTH, "2026-11-25"),
    "glm": Row("GLM-4 (2024)", BOTH, "2026-11-25"),
    "starcoder2": Row("StarCoder2", BOTH, "2026-11-25"),
    "stablelm": Row("StableLM, Stable Code", BOTH, "2026-11-25"),
    "cohere": Row("Command R", BOTH, "2026-11-25"),
    "cohere2": Row("Command R7B, A", BOTH, "2026-11-25"),
    "internlm2": Row(
        "InternLM2", "transformers (Llama's class on the same weights; it has none of its own), llama.cpp", "2026-11-25"
    ),
    "hunyuan_v1_dense": Row("Hunyuan (dense)", BOTH, "2026-11-25"),
    "ministral3": Row("Ministral 3", BOTH, "2026-11-25"),
    "gemma": Row("Gemma 1", BOTH, "2026-11-25"),
}


def families_table() -> str:
    """A row for each family that has one."""
    lines = [
        "| models | GGUF, `general.architecture` | safetensors, `architectures` | compared with | since |",
        "|---|---|---|---|---|",
    ]
    for name, row in ROWS.items():
        family = FAMILIES[name]
        classes = ", ".join(f"`{one}`" for one in (family.hf_class, family.hf_wrapper, *family.hf_alike) if one)
        lines.append(f"| {row.models} | `{family.gguf_name}` | {classes} | {row.beside} | {row.since} |")
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """The text of the README with the table between its markers."""
    before, _, rest = readme.partition(START)
    return f"{before}{START}\n{families_table()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """The command line described at the top of this file."""
    README.write_text(with_table(README.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
